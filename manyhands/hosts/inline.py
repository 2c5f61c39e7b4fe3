"""A component in this very process: a call is done when it returns. The default for one learner, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.types import Future, Handle


class InlineFuture:
    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value


class InlineHandle:
    def __init__(self, component: Any, name: str) -> None:
        self.component = component
        self.name = name

    def call(self, method: str, *arguments: Any, timeout_s: float = float("inf")) -> Future:
        return InlineFuture(getattr(self.component, method)(*arguments))

    def hurry(self) -> None:
        """Nothing to do: a call has always returned already."""

    def hang_up(self) -> None:
        """Nobody waits at the other end."""

    def close(self, deadline: float) -> None:
        self.component.close()


class InlineHost:
    ahead = 1  # calls worth having in flight

    def start(self, make: Callable[..., Any], *arguments: Any, name: str, threads: int = 0) -> Handle:
        return InlineHandle(make(*arguments), name)

    def wait(self, futures: list[Future], timeout_s: float) -> None:
        """Every call is done."""
