"""Small Blackwell GEMMs for the emulator's tests: TMA loads, tcgen05.mma, an epilogue that reads TMEM.

D[m, n] = sum over k of A[m, k] B[n, k]; A and B are K-major, D is f32 and row-major. Warp 0 loads and multiplies in
the one-CTA kernel; in the two-CTA kernel warp 0 loads, warp 1 multiplies (in the CTA that leads the pair). All four
warps read the accumulator. Extents are whole tiles.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import cute, pipeline, utils
from cutlass.cute.nvgpu import cpasync, tcgen05

from kernel_factory.family import HostEntry

THREADS = 128
DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Extents, the tile of one MMA (M is that of both CTAs of a pair), and how many CTAs issue it together."""

    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    ctas: int
    dtype: str


def entry(**fields: int | str) -> HostEntry:
    """The host function of a GEMM with these fields: pointers A, B, D, then the stream."""
    gemm = Gemm(**fields)
    return HostEntry(function=_host(gemm), pointer_dtypes=(gemm.dtype, gemm.dtype, "f32"), scalars=0)


def _host(g: Gemm):
    dtype = DTYPES[g.dtype]
    tiler = (g.tile_m, g.tile_n, g.tile_k)
    group = tcgen05.CtaGroup.TWO if g.ctas == 2 else tcgen05.CtaGroup.ONE

    @cute.struct
    class Storage:
        full_empty: cute.struct.MemRange[cutlass.Int64, g.stages * 2]
        done: cute.struct.MemRange[cutlass.Int64, 2]
        dealloc: cutlass.Int64
        tmem_address: cutlass.Int32

    @cute.kernel
    def gemm(
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        mA: cute.Tensor,
        load_b: cute.CopyAtom,
        mB: cute.Tensor,
        mD: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        cluster: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, block_n, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        where = cluster.get_flat_coord(rank)
        half = block_m % g.ctas
        tile = (block_m // g.ctas, block_n, None)
        storage = utils.SmemAllocator()
        s = storage.allocate(Storage)
        sA = storage.allocate_tensor(dtype, layout_a.outer, 1024, layout_a.inner)
        sB = storage.allocate_tensor(dtype, layout_b.outer, 1024, layout_b.inner)
        bytes_a = cute.size_in_bytes(dtype, cute.select(layout_a, mode=[0, 1, 2]))
        bytes_b = cute.size_in_bytes(dtype, cute.select(layout_b, mode=[0, 1, 2]))
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        filler, eater = pipeline.PipelineTmaUmma.create(
            barrier_storage=s.full_empty.data_ptr(),
            num_stages=g.stages,
            producer_group=one,
            consumer_group=one,
            tx_count=(bytes_a + bytes_b) * g.ctas,
            cta_layout_vmnk=cluster,
        ).make_participants()
        maker, taker = pipeline.PipelineUmmaAsync.create(
            barrier_storage=s.done.data_ptr(),
            num_stages=1,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS * g.ctas),
            cta_layout_vmnk=cluster,
        ).make_participants()
        tmem = utils.TmemAllocator(
            s.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            is_two_cta=g.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=s.dealloc.ptr,
        )
        columns = max(32, 1 << (g.tile_n - 1).bit_length())
        tmem.allocate(columns)

        gA = cute.local_tile(mA, tiler, tile, proj=(1, None, 1))
        gB = cute.local_tile(mB, tiler, tile, proj=(None, 1, 1))
        gD = cute.local_tile(mD, tiler, tile, proj=(1, 1, None))
        part = mma.get_slice(half)
        tCgA, tCgB, tCgD = part.partition_A(gA), part.partition_B(gB), part.partition_C(gD)
        tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        acc_layout = mma.make_fragment_C(mma.partition_shape_C(tiler[:2])).layout
        tAsA, tAgA = cpasync.tma_partition(
            load_a,
            where[2],
            cute.make_layout(cute.size(cluster, mode=[2])),
            cute.group_modes(sA, 0, 3),
            cute.group_modes(tCgA, 0, 3),
        )
        tBsB, tBgB = cpasync.tma_partition(
            load_b,
            where[1],
            cute.make_layout(cute.size(cluster, mode=[1])),
            cute.group_modes(sB, 0, 3),
            cute.group_modes(tCgB, 0, 3),
        )
        tmem.wait_for_alloc()
        tCtD = cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), acc_layout)
        tiles = cute.size(gA, mode=[2])

        if cutlass.const_expr(g.ctas == 1):
            if warp == 0:
                out = maker.acquire_and_advance()
                for _ in cutlass.range(tiles, prefetch_stages=g.stages - 1):
                    empty = filler.acquire_and_advance()
                    cute.copy(load_a, tAgA[None, empty.count], tAsA[None, empty.index], tma_bar_ptr=empty.barrier)
                    cute.copy(load_b, tBgB[None, empty.count], tBsB[None, empty.index], tma_bar_ptr=empty.barrier)
                    full = eater.wait_and_advance()
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        at = (None, None, block, full.index)
                        cute.gemm(mma, tCtD, tCrA[at], tCrB[at], tCtD)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    full.release()
                out.commit()
        else:
            if warp == 0:
                for k in cutlass.range(tiles, unroll=1):
                    empty = filler.acquire_and_advance()
                    cute.copy(load_a, tAgA[None, k], tAsA[None, empty.index], tma_bar_ptr=empty.barrier)
                    cute.copy(load_b, tBgB[None, k], tBsB[None, empty.index], tma_bar_ptr=empty.barrier)
                filler.tail()
            elif warp == 1 and half == 0:
                out = maker.acquire_and_advance()
                for _ in cutlass.range(tiles, unroll=1):
                    full = eater.wait_and_advance()
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        at = (None, None, block, full.index)
                        cute.gemm(mma, tCtD, tCrA[at], tCrB[at], tCtD)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    full.release()
                out.commit()

        tmem.relinquish_alloc_permit()
        done = taker.wait_and_advance()
        read = tcgen05.make_tmem_copy(
            cute.make_copy_atom(
                tcgen05.Ld16x256bOp(tcgen05.Repetition.x4)
                if g.tile_m == 64
                else tcgen05.Ld32x32bOp(tcgen05.Repetition.x32),
                cutlass.Float32,
            ),
            tCtD,
        ).get_slice(thread)
        tDtD, tDgD = read.partition_S(tCtD), read.partition_D(tCgD)
        tDrD = cute.make_rmem_tensor(tDgD.shape, cutlass.Float32)
        cute.copy(read, tDtD, tDrD)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(tDrD, tDgD)
        done.release()
        pipeline.sync(barrier_id=1)
        tmem.free(tCtD.iterator)

    @cute.jit
    def host(a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, stream: cuda.CUstream):
        mA = cute.make_tensor(a, cute.make_ordered_layout((g.m, g.k), order=(1, 0)))
        mB = cute.make_tensor(b, cute.make_ordered_layout((g.n, g.k), order=(1, 0)))
        mD = cute.make_tensor(d, cute.make_ordered_layout((g.m, g.n), order=(1, 0)))
        mma = cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                dtype,
                cutlass.Float32,
                (g.tile_m, g.tile_n, 16),
                group,
                tcgen05.OperandSource.SMEM,
                tcgen05.OperandMajorMode.K,
                tcgen05.OperandMajorMode.K,
            )
        )
        layout_a = blackwell.make_smem_layout_a(mma, tiler, dtype, g.stages)
        layout_b = blackwell.make_smem_layout_b(mma, tiler, dtype, g.stages)
        cluster = cute.tiled_divide(cute.make_layout((g.ctas, 1, 1)), (mma.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(group)
        load_a, tA = cute.nvgpu.make_tiled_tma_atom_A(
            load, mA, cute.select(layout_a, mode=[0, 1, 2]), tiler, mma, cluster.shape
        )
        load_b, tB = cute.nvgpu.make_tiled_tma_atom_B(
            load, mB, cute.select(layout_b, mode=[0, 1, 2]), tiler, mma, cluster.shape
        )
        gemm(mma, load_a, tA, load_b, tB, mD, layout_a, layout_b, cluster).launch(
            grid=(g.m // g.tile_m * g.ctas, g.n // g.tile_n, 1),
            block=(THREADS, 1, 1),
            cluster=(g.ctas, 1, 1),
            stream=stream,
        )

    return host
