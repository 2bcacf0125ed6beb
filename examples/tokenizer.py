"""From text to token ids: a small sentencepiece BPE model, trained on the corpus itself in seconds.

Both the model and the tokenised corpus are kept as files in a directory and read from there the next time.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from corpus import load_corpus
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

PAD_ID = 0
BOS_ID = 1  # begins what is fed to the model
EOS_ID = 2  # ends every document
VOCABULARY = 4000
# One character of 200 in the text is a rare one, left to byte tokens: all would fill the vocabulary.
CHARACTER_COVERAGE = 0.995
SAMPLE = 12_000  # documents the tokenizer is trained on: more of them cost time and change little


def load_documents(directory: Path) -> list[np.ndarray]:
    """The corpus as token ids, in the order of `load_corpus`: each document an int64 array [tokens] that
    ends with EOS_ID. Made by the first call, and read from `directory` after that."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"documents-{VOCABULARY}.npz"
    with one_process_at_a_time(directory):
        if not path.exists():
            text = load_corpus()
            pieces = load_tokenizer(directory, text).encode(text, add_eos=True)
            buffer = io.BytesIO()
            # One flat array and where each document ends, because npz cannot hold arrays of unequal lengths.
            np.savez(
                buffer,
                ids=np.concatenate(pieces).astype(np.int32),
                ends=np.cumsum([len(piece) for piece in pieces]),
            )
            write_whole(path, buffer.getvalue())
    with np.load(path) as stored:
        return np.split(stored["ids"].astype(np.int64), stored["ends"][:-1])


def load_tokenizer(directory: Path, text: list[str]) -> SentencePieceProcessor:
    """The tokenizer kept in `directory`, trained on the first documents of `text` if there is none yet."""
    path = directory / f"tokenizer-{VOCABULARY}.model"
    if not path.exists():
        write_whole(path, train_tokenizer(text[:SAMPLE], VOCABULARY))
    return SentencePieceProcessor(model_file=str(path))


def train_tokenizer(text: list[str], vocabulary: int) -> bytes:
    """A BPE model of `vocabulary` pieces as the bytes of a sentencepiece model file.

    Padding has an id of its own, which stands for nothing else: only then can padding be told from text.
    """
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        character_coverage=CHARACTER_COVERAGE,
        byte_fallback=True,
        add_dummy_prefix=False,  # Chinese has no spaces: a document would only begin with one more token
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        unk_id=3,
        minloglevel=2,
    )
    return model.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either absent or complete, whenever the process dies."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


@contextmanager
def one_process_at_a_time(directory: Path) -> Iterator[None]:
    """Workers of one machine come here together: the first makes the files, the others wait and read them."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
