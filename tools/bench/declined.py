"""What the host side of a declined call costs, by the gate that decides; the formula itself is taken out.

``make bench`` and ``tools/bench/pytorch.py`` print these. CPU time of this thread; *adds* is over
``generic_path``, which makes the argument record and checks it as the op does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kf_runtime
import steady
import torch
from kf_runtime.ops import trimul_arguments
from steady import Arms

update = kf_runtime.triangle_multiplicative_update
home = importlib.import_module("kf_runtime.ops.triangle_multiplicative_update")
CHECKS = "arguments and checks alone"


def operands(n: int, c: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors of a biasless call."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (1, n, n, c), "mask": (1, n, n), **trimul_arguments.shapes(c, c)}
    names = [k for k in shapes if not (k[:2] in ("p_", "g_") and k.endswith("bias"))]
    return {k: (torch.randn(shapes[k], generator=generator) * shapes[k][-1] ** -0.5).to(dtype) for k in names}


@contextmanager
def without_the_formula() -> Iterator[None]:
    """The generic path does nothing, so that what remains is the deciding."""
    real, home.generic = home.generic, lambda call: None
    try:
        yield
    finally:
        home.generic = real


def show(figures: dict[str, float]) -> None:
    """One line an arm: what it takes, and what a declined one adds to its checks."""
    for name, value in figures.items():
        adds = f"   adds {value - figures[CHECKS]:5.2f}" if name.startswith("declined") else ""
        print(f"  {name:26} {value:6.2f}{adds}")


def before_a_driver(others: Callable[..., Arms] | None = None) -> None:
    """Declines that ask no driver: dtype, device, grad; beside ``others(x, mask, parameters)``."""
    bf16, f32 = operands(8, 32, torch.bfloat16), operands(8, 32, torch.float32)
    x, mask, rest = bf16["x"], bf16["mask"], {k: v for k, v in bf16.items() if k not in ("x", "mask")}
    grad = {k: v.clone().requires_grad_() for k, v in rest.items()}
    wide = {k: f32[k] for k in rest}
    arms: Arms = {
        "declined by dtype": lambda: update(f32["x"], "outgoing", f32["mask"], **wide),
        "declined by device": lambda: update(x, "outgoing", mask, **rest),
        CHECKS: lambda: home.generic_path(x, "outgoing", mask, **rest),
        **(others(x, mask, rest) if others else {}),
    }
    print("host side of a declined call, the formula itself taken out (us a call, checks of 10 tensors included):")
    with without_the_formula():
        with torch.no_grad():
            figures = steady.microseconds(arms)
        slow = steady.microseconds({"declined by grad": lambda: update(x, "outgoing", mask, **grad)})
    show({**slow, **figures})


def on_the_driver(call: dict[str, Any]) -> None:
    """Declines that need the manifest. ``call`` is admitted by the present dispatcher, on a driver with stubs."""
    small = operands(8, 32, torch.bfloat16)
    x, weight = call["x"], call["p_in_weight"]
    turned = {**call, "x": x.transpose(1, 2).contiguous().transpose(1, 2)}
    shifted = {**call, "p_in_weight": torch.cat((weight.new_zeros(1), weight.flatten()))[1:].view(weight.shape)}
    grad = {k: v.clone().requires_grad_() if k.endswith(("weight", "bias")) else v for k, v in call.items()}
    with without_the_formula():
        with torch.no_grad():
            update(**call)
            figures = steady.microseconds(
                {
                    "declined by cell": lambda: update(**small),
                    "declined by eps": lambda: update(**{**call, "eps": 1e-3}),
                    "declined by strides": lambda: update(**turned),
                    "declined by alignment": lambda: update(**shifted),
                    "declined by weights": lambda: update(**{**call, "norm_in_bias": None}),
                    CHECKS: lambda: home.generic_path(**call),
                }
            )
        slow = steady.microseconds({"declined by grad, admitted": lambda: update(**grad)})
    show({**slow, **figures})
