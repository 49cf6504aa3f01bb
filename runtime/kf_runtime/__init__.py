"""kf_runtime: proved, precompiled CUDA kernels for PyTorch pair ops; plain torch for every other call.

Names resolve at first use (PEP 562), so that ``import kf_runtime.cell`` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kf_runtime.cell import Cell as Cell
    from kf_runtime.errors import ArgumentError as ArgumentError
    from kf_runtime.errors import KfError as KfError
    from kf_runtime.errors import NotAdmitted as NotAdmitted
    from kf_runtime.explanation import explain as explain
    from kf_runtime.explanation import status as status
    from kf_runtime.manifest import Manifest as Manifest
    from kf_runtime.ops.residual_layer_norm import residual_layer_norm as residual_layer_norm
    from kf_runtime.ops.triangle_multiplicative_update import (
        triangle_multiplicative_update as triangle_multiplicative_update,
    )
    from kf_runtime.ops.trimul_arguments import TriMulPrecision as TriMulPrecision
    from kf_runtime.ops.trimul_gates import explain_gates as explain_gates
    from kf_runtime.ops.trimul_module import TriangleMultiplicativeUpdate as TriangleMultiplicativeUpdate
    from kf_runtime.ops.trimul_shapes import (
        prepare_triangle_multiplicative_update_training as prepare_triangle_multiplicative_update_training,
    )
    from kf_runtime.ops.trimul_shapes import (
        triangle_multiplicative_update_inference_shape_is_supported as triangle_multiplicative_update_inference_shape_is_supported,  # noqa: E501
    )
    from kf_runtime.ops.trimul_split import (
        triangle_multiplicative_update_split_parameters as triangle_multiplicative_update_split_parameters,
    )
    from kf_runtime.plan import Plan as Plan
    from kf_runtime.preload import preload as preload
    from kf_runtime.route import Generic as Generic
    from kf_runtime.route import UseCubin as UseCubin
    from kf_runtime.route import UseJit as UseJit

__version__: Final = "0.1.0"

_HOMES: Final = {
    "Cell": "kf_runtime.cell",
    "Plan": "kf_runtime.plan",
    "Manifest": "kf_runtime.manifest",
    "KfError": "kf_runtime.errors",
    "ArgumentError": "kf_runtime.errors",
    "NotAdmitted": "kf_runtime.errors",
    "Generic": "kf_runtime.route",
    "UseCubin": "kf_runtime.route",
    "UseJit": "kf_runtime.route",
    "explain": "kf_runtime.explanation",
    "status": "kf_runtime.explanation",
    "preload": "kf_runtime.preload",
    "residual_layer_norm": "kf_runtime.ops.residual_layer_norm",
    "explain_gates": "kf_runtime.ops.trimul_gates",
    "triangle_multiplicative_update_split_parameters": "kf_runtime.ops.trimul_split",
    "triangle_multiplicative_update": "kf_runtime.ops.triangle_multiplicative_update",
    "TriMulPrecision": "kf_runtime.ops.trimul_arguments",
    "TriangleMultiplicativeUpdate": "kf_runtime.ops.trimul_module",
    "triangle_multiplicative_update_inference_shape_is_supported": "kf_runtime.ops.trimul_shapes",
    "prepare_triangle_multiplicative_update_training": "kf_runtime.ops.trimul_shapes",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
