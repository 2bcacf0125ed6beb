"""A table of a price file, read field by field: whatever cannot be used names file, table and field."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

#: A number with more digits before or after its point is a mistake, and no arithmetic must fail at it.
_DIGITS = 20


class Table:
    """One table of the file, of which every field must be asked for; `done` refuses what is left."""

    def __init__(self, path: Path, name: str, values: Mapping[str, Any]) -> None:
        self.path, self.name, self._values = path, name, dict(values)

    def error(self, field: str | None, reason: object) -> ValueError:
        """A ValueError that says where in the file something is wrong."""
        where = f"[{self.name}] " if self.name else ""
        return ValueError(f"the price file {self.path}: {where}{f'{field}: ' if field else ''}{reason}")

    def take(self, field: str, kind: type[T] | tuple[type[T], ...], what: str, default: Any = ...) -> Any:
        """The value of a field, which must be of this type; what: how to write it."""
        if field not in self._values:
            if default is ...:
                raise self.error(field, f"is missing; it must be {what}")
            return default
        value = self._values.pop(field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(field, f"{value!r} must be {what}")
        return value

    def number(self, field: str, what: str, *, or_zero: bool = False) -> Decimal:
        """A Decimal above 0 (or 0); of a float of the file, what was written."""
        value = self.take(field, (str, int, float), what)
        number = as_decimal(str(value))
        if number is None or number < 0 or (number == 0 and not or_zero):
            raise self.error(field, f"{value!r} must be {what}, {'0 or more' if or_zero else 'above 0'}")
        return number

    def date(self) -> datetime.date | None:
        """The day in `date`, if there is one."""
        value = self.take("date", datetime.date, "a date, as in 2026-11-30", None)
        if isinstance(value, datetime.datetime):
            raise self.error("date", f"{value!r} must be a date without a time, as in 2026-11-30")
        date: datetime.date | None = value
        return date

    def source(self) -> str:
        """Who says so."""
        source: str = self.take("source", str, "text: who says so", f"price file {self.path}")
        return source

    def table(self, field: str) -> Table | None:
        """A table in this one, if there is one."""
        values = self.take(field, dict, "a table", None)
        return None if values is None else Table(self.path, self._below(field), values)

    def tables(self, field: str) -> dict[str, Table]:
        """The tables in a table, by name."""
        values = self.take(field, dict, "a table of tables", {})
        for name, value in values.items():
            if not isinstance(value, dict):
                raise self.error(f"{field}.{name}", f"{value!r} must be a table")
        return {
            name: Table(self.path, self._below(f"{field}.{name}"), value) for name, value in values.items()
        }

    def done(self) -> None:
        """All fields have been asked for: what is left has no meaning."""
        if self._values:
            raise self.error(None, f"unknown: {', '.join(sorted(self._values))}")

    def _below(self, field: str) -> str:
        return f"{self.name}.{field}" if self.name else field


def as_decimal(text: str) -> Decimal | None:
    """The number that is written there; None if there is none, or one of no use to anybody."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < _DIGITS else None
