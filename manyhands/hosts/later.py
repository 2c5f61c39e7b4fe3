"""An answer that is not there yet: what a component's method may return instead of keeping everybody else waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Later:
    def __init__(self) -> None:
        self._value: tuple[Any] | None = None
        self._listener: Callable[[Any], Any] | None = None

    def settle(self, value: Any) -> None:
        """Once. Whoever asked gets it now."""
        self._value = (value,)
        if self._listener is not None:
            self._listener(value)

    def then(self, listener: Callable[[Any], Any]) -> None:
        """For the host: called with the answer, at once if it is there already."""
        self._listener = listener
        if self._value is not None:
            listener(self._value[0])

    def done(self) -> bool:
        return self._value is not None

    def value(self) -> Any:
        assert self._value is not None
        return self._value[0]
