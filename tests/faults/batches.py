"""What a rank trains on at a step, from the seed, and what is in it, counted by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

PAD, IGNORE, VOCABULARY = 0, -100, 50

Rows = list[list[int]]


@dataclass(frozen=True)
class Counted:
    """Tokens of a stretch of training."""

    computed: int = 0
    valid: int = 0
    trained: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.computed + other.computed, self.valid + other.valid, self.trained + other.trained)

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.computed - other.computed, self.valid - other.valid, self.trained - other.trained)


def micro_batches(seed: int, rank: int, step: int) -> list[tuple[Rows, Rows]]:
    """Ids and labels of one or two micro-batches of padded rows. Steps count from 1."""
    numbers = random.Random(f"{seed}/{rank}/{step}")
    made = []
    for _ in range(numbers.choice((1, 1, 2))):
        width = numbers.randint(3, 12)
        ids: Rows = []
        for _ in range(numbers.randint(1, 4)):
            length = numbers.randint(1, width)
            ids.append([numbers.randrange(1, VOCABULARY) for _ in range(length)] + [PAD] * (width - length))
        prompt = numbers.randint(0, 2)
        labels = [
            [IGNORE if token == PAD or place < prompt else token for place, token in enumerate(row)]
            for row in ids
        ]
        made.append((ids, labels))
    return made


def recount(batches: list[tuple[Rows, Rows]]) -> Counted:
    """Count with plain loops, one token at a time."""
    computed = valid = trained = 0
    for ids, labels in batches:
        for row in ids:
            for token in row:
                computed += 1
                if token != PAD:
                    valid += 1
        for row in labels:
            for label in row:
                if label != IGNORE:
                    trained += 1
    return Counted(computed, valid, trained)
