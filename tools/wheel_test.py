"""The installed wheel with torch alone: its cells are the admitted ones, its bytes are whole, and the op computes.

    python -I tools/wheel_test.py ALLOWLISTS --sm SM ... [--cell TEXT]

Runs in an environment without the factory, the DSL and the checkout; needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import kf_runtime
import torch
from kf_runtime import dispatch, inspection


def main() -> int:
    """0 where all holds; else 1, with the reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("allowlists", type=Path)
    parser.add_argument("--sm", action="append", required=True)
    parser.add_argument("--cell", default="", help="only keys that hold this text or glob")
    options = parser.parse_args()
    for name in ("kernel_factory", "cutlass"):
        if importlib.util.find_spec(name):
            return _fail(f"expected an environment without {name}; found it")
    if not inspection.verify().ok:
        return _fail("\n".join(inspection.verify().lines))
    packaged = {cell.key for cell in dispatch.current().manifest().entries}
    admitted = _admitted(options.allowlists, options.sm, options.cell)
    if packaged != admitted:
        return _fail(f"missing {sorted(admitted - packaged)[:3]}; not admitted {sorted(packaged - admitted)[:3]}")
    error = _error_of_the_op()
    if not error < 1e-12:
        return _fail(f"the op in float64: expected an error below 1e-12; found {error:.2e}")
    print(f"{len(packaged)} cells of {len(options.sm)} SMs in {kf_runtime.__file__}; the op's error is {error:.1e}")
    return 0


def _admitted(folder: Path, sms: list[str], pattern: str) -> set[str]:
    lists = [path for sm in sms for path in folder.glob(f"*/{sm}.toml")]
    keys = {row["key"] for path in lists for row in tomllib.loads(path.read_text()).get("cell", [])}
    return {key for key in keys if fnmatch(key, f"*{pattern}*")}


def _error_of_the_op() -> float:
    """The op against its formula, written out here, on a small call that no kernel serves."""
    draw = torch.Generator().manual_seed(20261)
    c, d, n = 6, 4, 5
    shapes = {
        "p_in": (2 * d, c),
        "g_in": (2 * d, c),
        "p_out": (c, d),
        "g_out": (c, c),
        "norm_in": (c,),
        "norm_out": (d,),
    }
    w = {f"{k}_weight": torch.randn(*shape, generator=draw, dtype=torch.float64) for k, shape in shapes.items()}
    x = torch.randn(2, n, n, c, generator=draw, dtype=torch.float64)

    def norm(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        centred = v - v.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    h = norm(x, w["norm_in_weight"])
    ab = torch.sigmoid(h @ w["g_in_weight"].T) * (h @ w["p_in_weight"].T)
    t = torch.einsum("bikd,bjkd->bijd", ab[..., :d], ab[..., d:])
    y = torch.sigmoid(h @ w["g_out_weight"].T) * (norm(t, w["norm_out_weight"]) @ w["p_out_weight"].T)
    out = kf_runtime.triangle_multiplicative_update(x, "outgoing", **w)
    return ((out - y).norm() / y.norm()).item()


def _fail(reason: str) -> int:
    print(f"wheel test: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
