"""What the tokens of a run were like, by stage of training: a fold over the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlflow_tokens.lengths import Bucket, Lengths, merge, since
from mlflow_tokens.records import Quantities, Record, SegmentStart

#: Stages of a finished profile, and stretches that are kept until then.
STAGES, STRETCHES = 20, 160

#: Computed and valid tokens.
Tokens = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was fed up to optimizer step `step`, since the stretch before.

    by_source: of the sources whose tokens are known. by_length: rows, computed and valid tokens by the
    smallest row length of an octave, of a sample.
    """

    step: int
    by_source: Mapping[str, Tokens] = field(default_factory=dict)
    by_length: Mapping[int, Bucket] = field(default_factory=dict)


class Profile:
    """Adds up what was fed in stretches of equally many steps, which double where there are too many."""

    def __init__(self) -> None:
        self._width = 1
        self._stretches: dict[int, Stretch] = {}
        self._by_source: Mapping[str, Mapping[str, int]] = {}
        self._lengths = Lengths()

    def apply(self, record: Record) -> None:
        """Take what a record adds to the one before."""
        if isinstance(record, SegmentStart):
            self._by_source, self._lengths = {}, Lengths()
        if not isinstance(record, Quantities) or not (record.by_source or record.lengths.buckets):
            return
        lengths = record.lengths.by_octave()
        stretch = Stretch(
            record.step,
            {
                name: (
                    tokens["computed"] - self._by_source.get(name, {}).get("computed", 0),
                    tokens["valid"] - self._by_source.get(name, {}).get("valid", 0),
                )
                for name, tokens in record.by_source.items()
                if tokens.keys() >= {"computed", "valid"}
            },
            since(lengths, self._lengths).buckets,
        )
        self._by_source, self._lengths = record.by_source, lengths
        self._add(stretch)
        while len(self._stretches) > STRETCHES:
            self._width *= 2
            stretches, self._stretches = self._stretches, {}
            for one in stretches.values():
                self._add(one)

    def stages(self) -> list[Stretch]:
        """At most `STAGES` stretches of as many steps each, those trained again after a rollback included."""
        last = max((stretch.step for stretch in self._stretches.values()), default=0)
        if not last:
            return []
        count = min(STAGES, last)
        found: list[list[Stretch]] = [[] for _ in range(count)]
        for stretch in self._stretches.values():
            found[min(count - 1, (max(stretch.step, 1) - 1) * count // last)].append(stretch)
        return [_join(stretches) for stretches in found if stretches]

    def _add(self, stretch: Stretch) -> None:
        cell = (max(stretch.step, 1) - 1) // self._width
        before = self._stretches.get(cell)
        self._stretches[cell] = stretch if before is None else _join([before, stretch])


def _join(stretches: Sequence[Stretch]) -> Stretch:
    by_source: dict[str, Tokens] = {}
    for stretch in stretches:
        for name, (computed, valid) in stretch.by_source.items():
            before = by_source.get(name, (0, 0))
            by_source[name] = (before[0] + computed, before[1] + valid)
    lengths = merge(Lengths(stretch.by_length) for stretch in stretches)
    return Stretch(max(stretch.step for stretch in stretches), by_source, lengths.buckets)
