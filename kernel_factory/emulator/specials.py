"""Special registers of a batch (PTX ISA 10), as one value a thread or one value for all."""

from __future__ import annotations

import numpy as np

from . import clusters


def special_registers(M: object) -> dict[str, np.ndarray]:
    """By name, without the percent sign."""
    grid, block = M.config.grid, M.config.block
    lane = (M.threads & 31).astype(np.uint32)
    inside = (M.warp * 32).astype(np.uint32) + lane
    cta = M.ctas[M.cta].astype(np.uint32) if M.cta_count > 1 else M.ctas.astype(np.uint32)
    one = lambda x: np.array([x], np.uint32)  # noqa: E731
    out = {
        "tid.x": inside % block[0],
        "tid.y": inside // block[0] % block[1],
        "tid.z": inside // (block[0] * block[1]),
        "ctaid.x": cta % grid[0],
        "ctaid.y": cta // grid[0] % grid[1],
        "ctaid.z": cta // (grid[0] * grid[1]),
        "laneid": lane,
        "warpid": M.warp.astype(np.uint32),
        "nwarpid": one(M.warps),
        "smid": one(0),
        "nsmid": one(1),
        "gridid": one(1),
        "WARP_SZ": one(32),
        "aggr_smem_size": one(M.config.dynamic_shared + M.program.layout.static_shared),
        "lanemask_eq": np.uint32(1) << lane,
        "lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
        "dynamic_smem_size": one(M.config.dynamic_shared),
        "total_smem_size": one(M.config.dynamic_shared + M.program.layout.static_shared),
    }
    out["lanemask_le"] = out["lanemask_lt"] | out["lanemask_eq"]
    out["lanemask_ge"], out["lanemask_gt"] = ~out["lanemask_lt"], ~out["lanemask_le"]
    for i, axis in enumerate("xyz"):
        out[f"ntid.{axis}"], out[f"nctaid.{axis}"] = one(block[i]), one(grid[i])
    return {**out, **clusters.specials(M.shape, M.ctas, M.cta if M.cta_count > 1 else np.zeros(1, np.int64))}
