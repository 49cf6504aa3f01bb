"""Run the built wheel on the emulated driver: a route, an error against the oracle, a declined call.

    python tools/wheel_demo.py build/wheel-site [SM]

The wheel is the one in that folder, not the checkout's; the emulator comes from the checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path

SITE, SM = Path(sys.argv[1]).resolve(), (sys.argv[2:] or ["sm_90a"])[0]
sys.path.insert(0, str(SITE))

import kf_runtime
import torch
from kf_runtime.cell import Cell

from kernel_factory.emulator import install_driver
from kernel_factory.reference import relative_error, trimul_inputs, trimul_oracle


def main() -> int:
    """Print what happened; 0 when the cell ran its cubins and is as near the oracle as BF16 allows."""
    assert kf_runtime.__file__ and Path(kf_runtime.__file__).is_relative_to(SITE), kf_runtime.__file__
    driver = install_driver(SM)
    print(f"wheel {kf_runtime.__version__} from {SITE.name}, on {driver.product}")
    cell = Cell(op="triangle_multiplicative_update", B=1, N=64, C=128, D=128, direction="outgoing", mask=True, sm=SM)
    inputs = trimul_inputs(cell, "random", 20260)
    oracle = trimul_oracle(cell, inputs)
    mask, x = inputs.pop("mask"), inputs.pop("x")
    with torch.no_grad():
        print("route:", kf_runtime.explain("triangle_multiplicative_update", x, "outgoing", mask, **inputs))
        before = driver.launches
        out = kf_runtime.triangle_multiplicative_update(x, "outgoing", mask, **inputs)
        launches, error = driver.launches - before, relative_error(out, oracle)
        print(f"launches: {launches}; relative error against the float64 oracle: {error:.2e}")
        odd = x[:, :63, :63].contiguous(), "outgoing", mask[:, :63, :63].contiguous()
        print("declined:", kf_runtime.explain("triangle_multiplicative_update", *odd, **inputs))
    return 0 if launches == 3 and error <= 6e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
