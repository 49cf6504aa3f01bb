"""Typed errors of the runtime. Each says what, expected, found and the next step."""

from __future__ import annotations


class KfError(Exception):
    """Base of every error that this package raises on purpose."""


class CellKeyError(KfError, ValueError):
    """A text that is no cell key."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"not a cell key: {key!r}; expected "
            "op/phase/dtype.param_dtype/B#.N#.C#.D#/direction/mask|nomask/bias|nobias/sm_#; "
            "`kf cells` and `python -m kf_runtime list` print valid keys"
        )
