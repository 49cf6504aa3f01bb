"""One instruction as some threads of a batch execute it: what every runtime function is handed first."""

from __future__ import annotations

import numpy as np

from .errors import Fault
from .lanes import settle, spread, threads_of
from .registry import runtime


@runtime
class Issue:
    """``sel`` and ``n`` are the threads at hand (see ``lanes``), ``chosen`` those of them that the guard leaves (None:
    all), ``line`` is where the instruction stands."""

    __slots__ = ("M", "_threads", "chosen", "line", "n", "sel")

    def __init__(self, M: object, sel: object, n: int, guard: np.ndarray | None, line: int) -> None:
        self.M, self.sel, self.n, self.line = M, sel, n, line
        self.chosen = None if guard is None else settle(guard)
        self._threads: np.ndarray | None = None

    def narrowed(self, lanes: np.ndarray) -> Issue:
        """The same for these of the threads at hand."""
        out = Issue(self.M, self.sel, self.n, None, self.line)
        out.chosen = lanes
        return out

    @property
    def threads(self) -> np.ndarray:
        """Numbers of the threads that execute it."""
        if self._threads is None:
            ids = threads_of(self.M, self.sel)
            self._threads = ids if self.chosen is None else ids[self.chosen]
        return self._threads

    @property
    def lanes(self) -> np.ndarray:
        """Their places among the threads at hand."""
        return np.arange(self.n) if self.chosen is None else self.chosen

    @property
    def count(self) -> int:
        return self.n if self.chosen is None else self.chosen.shape[0]

    @property
    def whole(self) -> bool:
        """Do all lanes of whole warp slots execute it?"""
        return self.chosen is None and not isinstance(self.sel, np.ndarray)

    def some(self, lanes: np.ndarray | None) -> np.ndarray:
        """The threads at these places among them; all where None."""
        return self.threads if lanes is None else self.threads[lanes]

    def each(self, x: np.ndarray) -> np.ndarray:
        """A value of the threads at hand, one for each thread that executes."""
        if self.chosen is None:
            return spread(x, self.n)
        return x[self.chosen] if x.shape[0] == self.n else np.full(self.chosen.shape[0], x[0])

    def back(self, x: np.ndarray) -> np.ndarray:
        """The reverse: a value for each thread at hand, zeros where the guard is off."""
        if self.chosen is None:
            return x
        full = np.zeros(self.n, x.dtype)
        full[self.chosen] = x
        return full

    def fault(self, kind: str, message: str, cure: str, at: int = 0) -> Fault:
        """A Fault of the ``at``-th of its threads."""
        return Fault(kind, self.line, message, cure, int(self.threads[at]))
