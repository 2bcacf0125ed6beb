"""One data set for jobs of every kind: 48 rows, each padded to 16 positions, and its recount."""

from __future__ import annotations

import random

PAD, IGNORED, WIDTH, ROWS = 0, -100, 16, 48

_numbers = random.Random(5)
TEXTS = [[_numbers.randint(1, 47) for _ in range(_numbers.randint(2, WIDTH))] for _ in range(ROWS)]


def ids_of(row: int) -> list[int]:
    """The row's tokens, and padding."""
    return TEXTS[row] + [PAD] * (WIDTH - len(TEXTS[row]))


def labels_of(row: int) -> list[int]:
    """The first token is a prompt; padding is not trained on."""
    return [IGNORED, *TEXTS[row][1:]] + [IGNORED] * (WIDTH - len(TEXTS[row]))


#: What any job that is fed every row once must come to.
RECOUNT = {
    "computed": ROWS * WIDTH,
    "valid": sum(len(text) for text in TEXTS),
    "trained": sum(len(text) - 1 for text in TEXTS),
}
