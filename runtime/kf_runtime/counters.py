"""Counters: what happened in this process, by reason. Thread-safe; nothing falls back silently."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

log: Final = logging.getLogger("kf_runtime")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A kernel or record that should have been usable and was not: the reason's code, cause and cure, and how often."""

    code: str
    text: str
    count: int


@dataclass
class Counters:
    """Generic calls by reason and failures by cause. Hits are counted by the executors themselves."""

    _generic: Counter[str] = field(default_factory=Counter)
    _failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    _graphs: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def graph(self, code: str) -> None:
        """Count one call traced by torch.compile: "kf", or why its graph holds the generic path."""
        with self._lock:
            self._graphs[code] += 1

    def graphs(self) -> dict[str, int]:
        """Calls traced by torch.compile, by what their graphs hold."""
        with self._lock:
            return dict(self._graphs)

    def generic(self, code: str) -> None:
        """Count one call that ran the generic path."""
        with self._lock:
            self._generic[code] += 1
            first = self._generic[code] == 1
        if first:
            log.info("route: generic path (%s)", code)

    def failure(self, code: str, text: str) -> None:
        """Count a failure; the first of each code in a process is one warning with its cause and cure."""
        with self._lock:
            first = not any(known == code for known, _ in self._failures)
            self._failures[code, text] += 1
        if first:
            warnings.warn(f"kf_runtime runs the generic path: {text}", RuntimeWarning, stacklevel=4)

    def generic_calls(self) -> dict[str, int]:
        """Calls of the generic path by reason code."""
        with self._lock:
            return dict(self._generic)

    def failures(self) -> tuple[Failure, ...]:
        """Every failure so far."""
        with self._lock:
            return tuple(Failure(code=c, text=t, count=n) for (c, t), n in self._failures.items())
