"""Small warp-specialised Hopper GEMMs for the emulator's tests: TMA loads, wgmma, a TMA store.

D[m, n] = sum over k of A[m, k] B[n, k]; A is K-major, B K-major or N-major, D is f32 and row-major. One producer warp
fills a ring of stages; each consumer warpgroup multiplies 64 rows. In a cluster the CTAs share B: each loads its part
for all of them (multicast). Extents are whole tiles.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import cute, pipeline, utils
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernel_factory.family import HostEntry

DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
GROUP = 128


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Extents, tile (64 rows a consumer warpgroup), stages, CTAs of a cluster along m, element type, major of B."""

    m: int
    n: int
    k: int
    groups: int
    tile_n: int
    tile_k: int
    stages: int
    cluster: int
    dtype: str
    b_major: str = "k"


def entry(**fields: int | str) -> HostEntry:
    """The host function of a GEMM with these fields: pointers A, B, D, then the stream."""
    gemm = Gemm(**fields)
    return HostEntry(function=_host(gemm), pointer_dtypes=(gemm.dtype, gemm.dtype, "f32"), scalars=0)


def _host(g: Gemm):
    dtype = DTYPES[g.dtype]
    tile_m, consumers = 64 * g.groups, GROUP * g.groups
    kinds = warpgroup.SmemLayoutAtomKind
    kind_b, order_b = (kinds.K_SW128, (0, 1, 2)) if g.b_major == "k" else (kinds.MN_SW128, (1, 0, 2))
    major_b = warpgroup.OperandMajorMode.K if g.b_major == "k" else warpgroup.OperandMajorMode.MN
    stage_bytes = (tile_m + g.tile_n) * g.tile_k * 2

    @cute.kernel
    def gemm(
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        mA: cute.Tensor,
        load_b: cute.CopyAtom,
        mB: cute.Tensor,
        store_d: cute.CopyAtom,
        mD: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_d: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, block_n, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, g.stages * 2]
            sA: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_a)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_b)], 1024]
            sD: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, cute.cosize(layout_d)], 1024]

        s = utils.SmemAllocator().allocate(Storage)
        sA = s.sA.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        sB = s.sB.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        sD = s.sD.get_tensor(layout_d)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=s.barriers.data_ptr(),
            num_stages=g.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, g.cluster * consumers // 32),
            tx_count=stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, g.cluster, 1, 1)),
        )

        gA = cute.local_tile(mA, (tile_m, g.tile_k), (block_m, None))
        gB = cute.local_tile(mB, (g.tile_n, g.tile_k), (block_n, None))
        gD = cute.local_tile(mD, (tile_m, g.tile_n), (block_m, block_n))
        alone = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(load_a, 0, alone, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(
            load_b, rank, cute.make_layout(g.cluster), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        tDsD, tDgD = cpasync.tma_partition(store_d, 0, alone, cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2))
        mask = cutlass.Int16((1 << g.cluster) - 1 if g.cluster > 1 else 0)
        tiles = cute.size(gA, mode=[2])

        if warp == consumers // 32:
            fill = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, g.stages)
            for _ in range(tiles):
                ring.producer_acquire(fill)
                full = ring.producer_get_barrier(fill)
                cute.copy(load_a, tAgA[None, fill.count], tAsA[None, fill.index], tma_bar_ptr=full)
                cute.copy(load_b, tBgB[None, fill.count], tBsB[None, fill.index], tma_bar_ptr=full, mcast_mask=mask)
                ring.producer_commit(fill)
                fill.advance()
            ring.producer_tail(fill)

        if warp < consumers // 32:
            part = mma.get_slice(cute.arch.make_warp_uniform(thread // GROUP) * GROUP)
            tCrA, tCrB = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
            whole = mma.get_slice(thread)
            tCsD = whole.partition_C(sD)
            acc = cute.make_rmem_tensor(tCsD.shape, cutlass.Float32)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            take = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, g.stages)
            for _ in range(tiles):
                ring.consumer_wait(take)
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    at = (None, None, block, take.index)
                    cute.gemm(mma, acc, tCrA[at], tCrB[at], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(take)
                take.advance()
            cute.autovec_copy(acc, tCsD)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=consumers)
            if warp == 0:
                cute.copy(store_d, tDsD, tDgD)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def launch(a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, stream: cuda.CUstream):
        mA = cute.make_tensor(a, cute.make_layout((g.m, g.k), stride=(g.k, 1)))
        strides_b = (g.k, 1) if cutlass.const_expr(g.b_major == "k") else (1, g.n)
        mB = cute.make_tensor(b, cute.make_layout((g.n, g.k), stride=strides_b))
        mD = cute.make_tensor(d, cute.make_layout((g.m, g.n), stride=(g.n, 1)))
        mma = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            warpgroup.OperandMajorMode.K,
            major_b,
            cutlass.Float32,
            (g.groups, 1, 1),
            tiler_mn=(64, g.tile_n),
        )
        layout_a = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kinds.K_SW128, dtype), (tile_m, g.tile_k, g.stages), order=(0, 1, 2)
        )
        layout_b = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind_b, dtype), (g.tile_n, g.tile_k, g.stages), order=order_b
        )
        layout_d = cute.make_layout((tile_m, g.tile_n), stride=(g.tile_n, 1))
        one = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if cutlass.const_expr(g.cluster > 1) else one
        load_a, tA = cpasync.make_tiled_tma_atom(one, mA, cute.slice_(layout_a, (None, None, 0)), (tile_m, g.tile_k))
        load_b, tB = cpasync.make_tiled_tma_atom(
            shared, mB, cute.slice_(layout_b, (None, None, 0)), (g.tile_n, g.tile_k), num_multicast=g.cluster
        )
        store_d, tD = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mD, layout_d, (tile_m, g.tile_n))
        gemm(mma, load_a, tA, load_b, tB, store_d, tD, layout_a, layout_b, layout_d).launch(
            grid=(g.m // tile_m, g.n // g.tile_n, 1),
            block=(consumers + GROUP, 1, 1),
            cluster=(g.cluster, 1, 1),
            stream=stream,
        )

    return launch
