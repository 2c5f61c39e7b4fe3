"""Connections from one component to several others of a kind, made anew when one of those was replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.hosts.process import ChildLost
from manyhands.types import Address, Caller

CALL_S = 20.0  # a component that says nothing for so long is taken for lost
REPLACED_S = 90.0  # how long a lost one may take to come back


class Lines:
    """Connections to all servers, made anew when one was replaced."""

    def __init__(self, addresses: Sequence[Address], patience_s: float = REPLACED_S) -> None:
        """patience_s: how long a component may be away, or keep us waiting."""
        self._addresses, self._patience_s = addresses, patience_s
        self._callers: list[Caller | None] = [None] * len(addresses)

    def ask_all(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return self.ask(method, lambda number: arguments)

    def ask_one(self, number: int, method: str, *arguments: Any) -> dict[str, Any]:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return self._caller(number, until).call(method, *arguments, timeout_s=CALL_S).result()
            except ChildLost:
                self._drop(number)
                if time.monotonic() > until:
                    raise

    def ask(self, method: str, arguments: Callable[[int], tuple]) -> list[dict[str, Any]]:
        """All servers at once. Each answer is there in the end, if need be from a server that took a lost one's place; the
        servers recognise what they are asked twice."""
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self._patience_s
        while len(answers) < len(self._addresses):
            calls = {}
            for number in range(len(self._addresses)):
                if number not in answers:
                    calls[number] = self._caller(number, until).call(method, *arguments(number), timeout_s=CALL_S)
            for number, call in calls.items():
                try:
                    answers[number] = call.result()
                except ChildLost:
                    self._drop(number)
                    if time.monotonic() > until:
                        raise
        return [answers[number] for number in range(len(self._addresses))]

    def _caller(self, number: int, until: float) -> Caller:
        caller = self._callers[number]
        if caller is None:
            caller = self._callers[number] = self._addresses[number].connect(max(until - time.monotonic(), 0.0))
        return caller

    def _drop(self, number: int) -> None:
        if (caller := self._callers[number]) is not None:
            caller.close()
        self._callers[number] = None

    def close(self) -> None:
        for number in range(len(self._callers)):
            self._drop(number)
