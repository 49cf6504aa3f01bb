"""Our ops under ``cuequivariance_torch``: its top module and its ``primitives.triangle``.

Where the package's own kernels are installed, a call that KF declines goes on to them; where they
are not (its functions would raise ImportError then), our generic path answers.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Final

import torch
from torch import Tensor

from kf_runtime.integrations.patching import Patches
from kf_runtime.ops import trimul_kf
from kf_runtime.ops.triangle_multiplicative_update import arguments, triangle_multiplicative_update
from kf_runtime.ops.trimul_arguments import check

INCUMBENT: Final = "cuequivariance_ops_torch"
OP: Final = "triangle_multiplicative_update"


def patch(patches: Patches) -> None:
    """Replace the function in both modules that hold it."""
    import cuequivariance_torch
    from cuequivariance_torch.primitives import triangle

    replacement = triangle_multiplicative_update
    if importlib.util.find_spec(INCUMBENT) is not None:
        replacement = chained(getattr(triangle, OP))
    for module in (cuequivariance_torch, triangle):
        patches.put(module, OP, replacement)


def chained(incumbent: Any) -> Any:
    """Our op, with ``incumbent`` in the place of the generic path."""

    @functools.wraps(triangle_multiplicative_update)
    def call(*args: Any, **kwargs: Any) -> Any:
        record = arguments(*args, **kwargs)
        check(record)
        answer: Any
        if torch.compiler.is_dynamo_compiling():
            from kf_runtime.ops.trimul_compiled import compiled

            answer = compiled(record)
        else:
            answer = trimul_kf.attempt(record)
        return answer if isinstance(answer, Tensor) else incumbent(*args, **kwargs)

    return call
