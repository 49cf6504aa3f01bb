"""project: x -> ab. LayerNorm, gate and value projections, sigmoid, product and mask in one pass.

    h  = LayerNorm(x);  ab[c] = sigmoid(g_in[c] . h + gb[c]) * (p_in[c] . h + pb[c]) * mask

x [B, N, N, C], mask [B, N, N], weights [2D, C] row-major, ab [2, B, D, N, Np] with Np = N rounded
up to 64; all bf16. Columns N .. Np of ab are written as zeros, so a reader needs no predicate along
them. h and ab are the only roundings.

A warp owns 32 consecutive positions of one row of the pair and all channels. Its h is
the B operand and stays in registers (see mma_tools); weights are the A operand, 16 gate and 16 value
rows a stage, so the accumulator holds channels by positions and ab is written channel-first. Row
(j, g) of B is position 8 * (g // 2) + 2 * j + g % 2, which gives each lane 8 consecutive positions
of a channel: 16-byte stores of whole sectors, with no exchange.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from kernel_factory.families.trimul_mma import mma_tools as tools
from kernel_factory.families.trimul_mma.plan import BLOCK, PAD, STAGE_ROWS, ProjectTile
from kernel_factory.family import KernelSpec

_VEC = tools.VECTOR


class Project:
    """Host entry and kernel of one specialisation. Scalars: N, B."""

    def __init__(self, spec: KernelSpec) -> None:
        self.C, self.D = spec["C"], spec["D"]
        self.mask, self.biases = spec["mask"], spec["biases"]
        self.tile = ProjectTile.of(spec)
        self.threads = self.tile.warps * tools.WARP
        self.stages_total = 2 * self.D // STAGE_ROWS
        self.k_chunks = self.C // 32

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        pX, pNormW, pNormB, pP, pG, *rest, n, batch, stream = arguments
        pPBias, pGBias = (rest.pop(0), rest.pop(0)) if cutlass.const_expr(self.biases) else (None, None)
        pMask = rest.pop(0) if cutlass.const_expr(self.mask) else None
        blocks = n * (cute.ceil_div(n, PAD) * (PAD // BLOCK))
        self.kernel(pX, pNormW, pNormB, pP, pG, pPBias, pGBias, pMask, rest[0], n, batch).launch(
            grid=(cute.ceil_div(blocks, self.tile.warps), 1, batch),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=12 // self.tile.warps,  # 168 registers a thread
            preferred_smem_carveout=100,  # left open, the DSL would ask a device for it
            smem=self.tile.shared_bytes(self.C),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        pX: cute.Pointer,
        pNormW: cute.Pointer,
        pNormB: cute.Pointer,
        pP: cute.Pointer,
        pG: cute.Pointer,
        pPBias: cute.Pointer | None,
        pGBias: cute.Pointer | None,
        pMask: cute.Pointer | None,
        pAB: cute.Pointer,
        n: Int32,
        batch: Int32,
    ):
        bidx, _, b = cute.arch.block_idx()
        lane, warp = tools.lane_and_warp()
        g, q = lane // 4, lane % 4
        n_padded = cute.ceil_div(n, PAD) * PAD
        blocks_row = n_padded // BLOCK
        block = bidx * self.tile.warps + warp
        active = block < n * blocks_row
        i = cutlass.min(block // blocks_row, n - 1)
        j0 = (block % blocks_row) * BLOCK

        smem = cutlass.utils.SmemAllocator()
        sW_layout = cute.make_layout(
            (_VEC, self.C // _VEC, 2 * STAGE_ROWS, self.tile.stages), stride=(1, _VEC, self.C, 2 * STAGE_ROWS * self.C)
        )
        sW = smem.allocate_tensor(BFloat16, sW_layout, byte_alignment=128)
        for s in cutlass.range_constexpr(self.tile.stages - 1):
            if cutlass.const_expr(s < self.stages_total):
                self.load_weights(pG, pP, s * STAGE_ROWS, sW[None, None, None, s])
            cute.arch.cp_async_commit_group()

        row = (Int64(b) * n + i) * n
        tBrH = self.load_h(pX, pNormW, pNormB, row, j0, n, g, q)
        cute.arch.sync_warp()  # or the mask's loads rise into the LayerNorm, where registers are scarce
        tMask = self.load_mask(pMask, row, j0, n, lane)

        tiled_mma = tools.warp_mma()
        tCrGate = cute.make_rmem_tensor(((2, 2), 1, 4), Float32)
        tCrValue = cute.make_rmem_tensor(((2, 2), 1, 4), Float32)
        # Channel c of operand w (a or b) is plane (w * batch + b) * D + c of ab.
        plane = Int64(n) * n_padded
        mAB = tools.vectors(pAB, Int64(i) * n_padded + j0 + 8 * q)
        for stage in cutlass.range(self.stages_total, unroll=1):
            cute.arch.cp_async_wait_group(self.tile.stages - 2)
            cute.arch.sync_threads()
            ahead = stage + (self.tile.stages - 1)
            if ahead < self.stages_total:
                self.load_weights(pG, pP, ahead * STAGE_ROWS, sW[None, None, None, ahead % self.tile.stages])
            cute.arch.cp_async_commit_group()

            channel = stage * STAGE_ROWS + g
            self.start(tCrGate, pGBias, channel)
            self.start(tCrValue, pPBias, channel)
            sW_stage = sW[None, None, None, stage % self.tile.stages]
            for t in cutlass.range_constexpr(self.k_chunks):
                self.multiply(tiled_mma, sW_stage, 0, tBrH, tCrGate, t, g, q)
                self.multiply(tiled_mma, sW_stage, STAGE_ROWS, tBrH, tCrValue, t, g, q)

            operand = cutlass.select_(channel >= self.D, batch - 1, Int32(0))
            channel_plane = (Int64(b + operand) * self.D + channel) * plane
            if active:
                for half in cutlass.range_constexpr(2):
                    tOut = self.gated(tCrGate, tCrValue, tMask, half)
                    mOut = tools.vectors(mAB.iterator, channel_plane + 8 * half * plane)
                    cute.autovec_copy(tOut, mOut)

    @cute.jit
    def load_weights(self, pG: cute.Pointer, pP: cute.Pointer, row0: Int32, sW: cute.Tensor) -> None:
        """Start the copies of 16 gate rows, then 16 value rows, from channel ``row0`` on."""
        tidx, _, _ = cute.arch.thread_idx()
        chunks = self.C // _VEC
        rows = self.threads // chunks
        chunk, row = tidx % chunks, tidx // chunks
        for pW, base in ((pG, 0), (pP, STAGE_ROWS)):
            mW = tools.vectors(pW, (row0 + row) * self.C + chunk * _VEC, (STAGE_ROWS // rows, rows * self.C))
            for r in cutlass.range_constexpr(STAGE_ROWS // rows):
                to = base + r * rows + row
                tools.copy_async(mW[None, r], sW[None, tools.weight_chunk(chunk, to), to])

    @cute.jit
    def load_h(self, pX, pNormW, pNormB, row, j0, n, g, q):
        """This warp's 32 rows of LayerNorm(x) as B fragments (8, C/32, 4). Rows past N repeat row N - 1."""
        tBrH = cute.make_rmem_tensor((_VEC, self.k_chunks, 4), BFloat16)
        for j in cutlass.range_constexpr(4):
            position = cutlass.min(j0 + 8 * (g // 2) + 2 * j + g % 2, n - 1)
            mX = tools.vectors(pX, (row + position) * self.C + q * _VEC, (self.k_chunks, 32))
            for t in cutlass.range_constexpr(self.k_chunks):
                cute.autovec_copy(mX[None, t], tBrH[None, t, j])
        tools.layer_norm(tBrH, pNormW, pNormB, q, n >> 31)
        return tBrH

    @cute.jit
    def load_mask(self, pMask, row, j0, n, lane):
        """The factors of this lane's 8 positions: the mask, and 0 past N. A lane loads one; shuffles spread them."""
        factor = Float32(0.0)
        if j0 + lane < n:
            factor = Float32(1.0)
            if cutlass.const_expr(pMask is not None):
                factor = cute.make_tensor(pMask + (row + j0), cute.make_layout(BLOCK))[lane].to(Float32)
        tMask = cute.make_rmem_tensor(_VEC, Float32)
        for p in cutlass.range_constexpr(_VEC):
            tMask[p] = cute.arch.shuffle_sync(factor, 8 * (lane % 4) + p)
        return tMask

    @cute.jit
    def start(self, tCr: cute.Tensor, pBias, channel: Int32) -> None:
        """Start an accumulator at the projection bias: channel for its first row, channel + 8 for its second."""
        if cutlass.const_expr(pBias is None):
            tCr.fill(0.0)
        else:
            mBias = cute.make_tensor(pBias + channel, cute.make_layout(2, stride=8))
            for half in cutlass.range_constexpr(2):
                tCr[(None, half), 0, None].fill(mBias[half].to(Float32))

    @cute.jit
    def multiply(self, tiled_mma, sW, base: int, tBrH, tCr, t: int, g, q) -> None:
        """Accumulate 16 weight rows times 32 positions over the 32 channels of chunk ``t``."""
        tAr = cute.make_rmem_tensor((_VEC, 2), BFloat16)
        for half in cutlass.range_constexpr(2):
            row = g + (base + 8 * half)
            cute.autovec_copy(sW[None, tools.weight_chunk(4 * t + q, g), row], tAr[None, half])
        tCrA = cute.make_tensor(tAr.iterator, cute.make_layout(((2, 2, 2), 1, 2), stride=((1, 8, 2), 0, 4)))
        tCrB = cute.make_tensor(
            tBrH[None, t, 0].iterator, cute.make_layout(((2, 2), 4, 2), stride=((1, 2), self.C // 4, 4))
        )
        cute.gemm(tiled_mma, tCr, tCrA, tCrB, tCr)

    @cute.jit
    def gated(self, tCrGate, tCrValue, tMask, half: int):
        """sigmoid(gate) * value * mask of this lane's 8 positions of one channel, rounded to bf16."""
        tProduct = cute.make_rmem_tensor(_VEC, Float32)
        for j in cutlass.range_constexpr(4):
            pair = tools.sigmoid_pair(tCrGate[(0, half), 0, j], tCrGate[(1, half), 0, j])
            for e in cutlass.range_constexpr(2):
                tProduct[2 * j + e] = pair[e] * tCrValue[(e, half), 0, j] * tMask[2 * j + e]
        tOut = cute.make_rmem_tensor(_VEC, BFloat16)
        tOut.store(tProduct.load().to(BFloat16))
        return tOut


def entry(spec: KernelSpec) -> tuple[Any, int]:
    """The host function and its number of pointers."""
    return Project(spec), 6 + 2 * spec["biases"] + spec["mask"]
