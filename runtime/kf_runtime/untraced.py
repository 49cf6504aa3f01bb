"""untraced: functions whose frames Dynamo leaves alone, and all that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
#: torch has no public form that costs a call nothing; where this one is missing, frames are not marked.
_frames: Final[Any] = getattr(torch._C._dynamo, "eval_frame", None)


def untraced(function: F) -> F:
    """Mark a function for eager calls: Dynamo compiles neither its frame nor frames below it.

    Dynamo sees them where it runs the caller as it is (``torch.compiler.set_stance("eager_then_compile")``, or a
    frame that it gave up), and fails on addresses, locks and driver calls. Inlined in a trace, it is traced as before.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
