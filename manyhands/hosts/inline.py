"""A component in this very process: a call is done when it returns. The default for one learner, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands.hosts.later import Later
from manyhands.types import Address, Caller, Future, Handle


class InlineFuture:
    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return not isinstance(self._value, Later) or self._value.done()

    def result(self) -> Any:
        if not isinstance(self._value, Later):
            return self._value
        if not self._value.done():
            raise RuntimeError("waiting for an answer that only other components in this very process could bring about")
        return self._value.value()


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


class InlineCaller:
    def __init__(self, handle: InlineHandle) -> None:
        self.name, self._handle = handle.name, handle

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Future:
        return self._handle.call(method, *arguments)

    def close(self) -> None:
        """The component is not ours."""


@dataclass(frozen=True)
class InlineAddress:
    doors: dict[str, InlineHandle]
    door: str

    def connect(self, timeout_s: float) -> Caller:
        return InlineCaller(self.doors[self.door])


class InlineHost:
    ahead = 1  # calls worth having in flight

    def __init__(self) -> None:
        self._doors: dict[str, InlineHandle] = {}

    def start(self, make: Callable[..., Any], *arguments: Any, name: str, threads: int = 0, door: str | None = None) -> Handle:
        handle = InlineHandle(make(*arguments), name)
        if door is not None:
            self._doors[door] = handle
        return handle

    def address(self, door: str, title: str) -> Address:
        return InlineAddress(self._doors, door)

    def wait(self, futures: list[Future], timeout_s: float) -> None:
        """Every call is done."""

    def close(self) -> None:
        """Components are closed one by one."""
