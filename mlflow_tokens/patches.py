"""Functions of other people's classes and modules, replaced and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Replaced attributes, in the order they were replaced; `revert` puts all of them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `owner.name` by a function that calls `wrapper(original, *args, **kwargs)`."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))

    @property
    def active(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._replaced)

    def revert(self) -> None:
        """Put back what was there, except where somebody has put something else on top of ours since."""
        for owner, name, original, replacement in reversed(self._replaced):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        self._replaced.clear()
