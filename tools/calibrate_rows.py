"""How far apart are two right answers? The rounding model in float32 against itself in float64.

Both make exactly the documented roundings; they differ in accumulation error alone, which now and
then moves a value across a rounding boundary. The worst pair row of that difference is the floor
under the policy's `model_worst_row`: no correct kernel can be asked to stay below it.

    python tools/calibrate_rows.py [N ...]
"""

from __future__ import annotations

import sys

import torch
from kf_runtime.cell import Cell

from kernel_factory.families.trimul_mma.model import ROW_AXES, model
from kernel_factory.reference import REFERENCES, relative_error, worst_row


def main() -> None:
    """Print, per N and input set, norm and worst row over three seeds."""
    for n in [int(argument) for argument in sys.argv[1:]] or [64, 100, 128]:
        cell = Cell(
            op="triangle_multiplicative_update", B=1, N=n, C=128, D=128, direction="outgoing", mask=True, sm="sm_90a"
        )
        for name in REFERENCES[cell.op].input_sets(cell):
            norms, rows = [], []
            for seed in range(3):
                inputs = REFERENCES[cell.op].inputs(cell, name, seed)
                exact, single = (model(cell, inputs, dtype)["out"] for dtype in (torch.float64, torch.float32))
                norms.append(relative_error(single, exact))
                rows.append(worst_row(single, exact, ROW_AXES["out"]))
            print(f"N={n:4} {name:16} norm {max(norms):.2e}  worst row {max(rows):.2e}")


if __name__ == "__main__":
    main()
