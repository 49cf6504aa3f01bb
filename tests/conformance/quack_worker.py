"""One process, one compile: ``python -m tests.conformance.quack_worker NAME FOLDER`` with CUTE_DSL_ARCH set.

A quack kernel is called from a host function that takes plain pointers and builds static layouts, so that the
factory's own record and replay can capture its launch. Leaves PTX, cubin and host object in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_ptr

from kernel_factory.compile import HOST_PREFIX, _host_function
from kernel_factory.family import HostEntry

ROWS = 8  # of every row-wise case; quack reads unwritten shared memory for the rows that a last tile lacks
SIZES = {"small": 512, "odd": 760, "wide": 20480}


DTYPES = {"bf16": cutlass.BFloat16, "f32": cutlass.Float32, "i64": cutlass.Int64}


def compile_entry(entry: HostEntry) -> object:
    """``cute.compile`` of a host function on fake pointers."""
    pointers = [
        make_ptr(DTYPES[dtype], 0x10000 * (i + 1), cute.AddressSpace.gmem, assumed_align=16)
        for i, dtype in enumerate(entry.pointer_dtypes)
    ]
    return cute.compile(entry.function, *pointers, cuda.CUstream(0))


def tensor(pointer: cute.Pointer, *shape: int) -> cute.Tensor:
    stride, strides = 1, []
    for extent in reversed(shape):
        strides.insert(0, stride)
        stride *= extent
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(strides)))


def rmsnorm(n: int, rows: int) -> HostEntry:
    from quack.rmsnorm import RMSNorm

    op = RMSNorm(cutlass.BFloat16, n)

    @cute.jit
    def host(x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, rstd: cute.Pointer, stream: cuda.CUstream):
        op(
            tensor(x, rows, n), tensor(w, n), None, None, tensor(out, rows, n), None, tensor(rstd, rows), None,
            Float32(1e-6), stream,
        )  # fmt: skip

    return HostEntry(function=host, pointer_dtypes=("bf16", "f32", "bf16", "f32"), scalars=0)


def layernorm(n: int, rows: int) -> HostEntry:
    from quack.rmsnorm import RMSNorm

    op = RMSNorm(cutlass.Float32, n, is_layernorm=True)

    @cute.jit
    def host(
        x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, rstd: cute.Pointer, mean: cute.Pointer,
        stream: cuda.CUstream,
    ):  # fmt: skip
        op(
            tensor(x, rows, n), tensor(w, n), None, None, tensor(out, rows, n), None, tensor(rstd, rows),
            tensor(mean, rows), Float32(1e-5), stream,
        )  # fmt: skip

    return HostEntry(function=host, pointer_dtypes=("f32",) * 5, scalars=0)


def softmax(n: int, rows: int) -> HostEntry:
    from quack.softmax import Softmax

    op = Softmax(cutlass.Float32, n)

    @cute.jit
    def host(x: cute.Pointer, out: cute.Pointer, stream: cuda.CUstream):
        op(tensor(x, rows, n), tensor(out, rows, n), stream)

    return HostEntry(function=host, pointer_dtypes=("f32", "f32"), scalars=0)


def softmax_backward(n: int, rows: int) -> HostEntry:
    from quack.softmax import SoftmaxBackward

    op = SoftmaxBackward(cutlass.Float32, n)

    @cute.jit
    def host(dy: cute.Pointer, y: cute.Pointer, dx: cute.Pointer, stream: cuda.CUstream):
        op(tensor(dy, rows, n), tensor(y, rows, n), tensor(dx, rows, n), stream)

    return HostEntry(function=host, pointer_dtypes=("f32",) * 3, scalars=0)


def cross_entropy(n: int, rows: int) -> HostEntry:
    from quack.cross_entropy import CrossEntropy

    op = CrossEntropy(cutlass.Float32, n, online_softmax=False)

    @cute.jit
    def host(
        x: cute.Pointer, target: cute.Pointer, loss: cute.Pointer, lse: cute.Pointer, dx: cute.Pointer,
        stream: cuda.CUstream,
    ):  # fmt: skip
        op(
            tensor(x, rows, n), tensor(target, rows), None, tensor(loss, rows), tensor(lse, rows), tensor(dx, rows, n),
            None, Int32(-100), stream,
        )  # fmt: skip

    return HostEntry(function=host, pointer_dtypes=("f32", "i64", "f32", "f32", "f32"), scalars=0)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A product of M x N x K = ``extent`` in tiles of 128 x 64 (pingpong: 64 x 64), clusters of ``cluster`` along M.

    ``resident``: how many clusters share the tiles out among them; one takes over tile after tile where that is fewer
    than there are tiles. None: on sm_100a a cluster asks the device for more work (clusterlaunchcontrol).
    """

    extent: tuple[int, int, int] = (192, 160, 128)
    cluster: int = 1
    resident: int | None = None
    pingpong: bool = False


# In the persistent ones every barrier goes round more than twice, and K has more tiles than there are stages: else the
# parity of a wait could not matter, nor what a stage is released behind.
GEMMS = {
    "cluster1": Gemm(),
    "cluster2": Gemm(cluster=2),
    "persistent1": Gemm(extent=(192, 224, 640), resident=1),
    "persistent2": Gemm(extent=(192, 224, 640), resident=1, cluster=2),
    "pingpong": Gemm(extent=(192, 160, 640), resident=1, pingpong=True),
}


def gemm(shape: Gemm, rows: int) -> HostEntry:
    """D = A B^T in bf16, by the class of the target's SM."""
    from quack.gemm_default_epi import GemmDefaultSm90, GemmDefaultSm100
    from quack.tile_scheduler import TileSchedulerOptions

    m, columns, k = shape.extent
    cluster = (shape.cluster, 1, 1)
    if os.environ["CUTE_DSL_ARCH"].startswith("sm_90"):
        tile = (64 if shape.pingpong else 128, 64)
        op = GemmDefaultSm90(cutlass.Float32, cutlass.BFloat16, tile, cluster, pingpong=shape.pingpong, use_pdl=False)
    else:
        asks = shape.resident is None
        op = GemmDefaultSm100(
            cutlass.Float32, cutlass.BFloat16, (128, 64), cluster, use_clc_persistence=asks, use_pdl=False
        )
    resident = shape.resident or 4

    @cute.jit
    def host(a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, stream: cuda.CUstream):
        op(
            tensor(a, 1, m, k), tensor(b, 1, columns, k), tensor(d, 1, m, columns), None, op.EpilogueArguments(),
            TileSchedulerOptions(Int32(resident)), None, stream,
        )  # fmt: skip

    return HostEntry(function=host, pointer_dtypes=("bf16", "bf16", "bf16"), scalars=0)


KERNELS: dict[str, Callable[[Any, int], HostEntry]] = {
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "softmax": softmax,
    "softmax_backward": softmax_backward,
    "cross_entropy": cross_entropy,
    "gemm": gemm,
}


def main(name: str, folder: Path) -> None:
    kernel, size = name.split("-")
    entry = KERNELS[kernel](GEMMS[size] if kernel == "gemm" else SIZES[size], ROWS)
    host = compile_entry(entry).dump_to_object(HOST_PREFIX)
    (folder / "host.o").write_bytes(host)
    (folder / "reply.json").write_text(
        json.dumps({"entry": _host_function(host), "pointers": len(entry.pointer_dtypes)})
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
