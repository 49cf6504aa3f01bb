"""What a user of docs/first-kernel.md runs at the end: one call with a kernel, one without, on the emulated driver."""

from __future__ import annotations

import torch

from kernel_factory.emulator import install_driver

install_driver("sm_90a")  # a machine with a GPU leaves this line out, and puts the tensors on "cuda"

import kf_runtime  # noqa: E402


def call(n: int) -> None:
    """One call at [1, n, n, 128]."""
    pair, row = (1, n, n, 128), (128,)
    x, residual, weight, bias = (torch.randn(*shape).bfloat16() for shape in (pair, pair, row, row))
    with torch.no_grad():
        out = kf_runtime.residual_layer_norm(x, residual, weight, bias)
    wide = torch.nn.functional.layer_norm(x.double() + residual.double(), row, weight.double(), bias.double())
    print(f"N={n}: error {float((out - wide).norm() / wide.norm()):.1e}")
    print("   ", kf_runtime.explain("residual_layer_norm", x, residual, weight, bias))


call(65)
call(66)
print("kernels ran", kf_runtime.status().hits, "time")
