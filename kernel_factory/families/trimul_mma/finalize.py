"""finalize: x, t -> y. Both LayerNorms, the two output GEMMs and the gate in one pass.

    y[c] = sigmoid(g_out[c] . LayerNorm(x) + gb[c]) * (p_out[c] . LayerNorm(t) + pb[c])

x, y [B, N, N, C], t [B, D, N, Np], g_out [C, C], p_out [C, D]; all bf16. The two LayerNorms and y
are the only roundings. x and t are read once, y is written once.

A warp owns 32 consecutive positions of one row of the pair. h and LayerNorm(t) are A operands and
stay in registers (see mma_tools): h as it is loaded from x, t through one ldmatrix.trans from a
staging area that all but the first two stages of the weight ring take over afterwards. Weights are
the B operand; row (c, jj, g) of it is channel 8 * (g // 2) + 4 * c + 2 * jj + g % 2 of a block of
32, so two stages give each lane 8 consecutive channels of a position: 16-byte stores of whole sectors.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from kernel_factory.families.trimul_mma import mma_tools as tools
from kernel_factory.families.trimul_mma.plan import BLOCK, EARLY_STAGES, PAD, STAGE_ROWS, FinalizeTile
from kernel_factory.family import KernelSpec

_VEC = tools.VECTOR


class Finalize:
    """Host entry and kernel of one specialisation. Scalars: N, B."""

    def __init__(self, spec: KernelSpec) -> None:
        self.C, self.D, self.biases = spec["C"], spec["D"], spec["biases"]
        self.tile = FinalizeTile.of(spec)
        self.threads = self.tile.warps * tools.WARP
        self.blocks_total = self.C // 32
        self.stage_elements = STAGE_ROWS * (self.C + self.D)

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        pX, pT, pNormInW, pNormInB, pNormOutW, pNormOutB, pP, pG, *rest, pY, n, batch, stream = arguments
        pPBias, pGBias = rest if cutlass.const_expr(self.biases) else (None, None)
        blocks = n * cute.ceil_div(n, BLOCK)
        self.kernel(pX, pT, pNormInW, pNormInB, pNormOutW, pNormOutB, pP, pG, pPBias, pGBias, pY, n).launch(
            grid=(cute.ceil_div(blocks, self.tile.warps), 1, batch),
            block=(self.threads, 1, 1),
            smem=self.tile.shared_bytes(self.C, self.D),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        pX: cute.Pointer,
        pT: cute.Pointer,
        pNormInW: cute.Pointer,
        pNormInB: cute.Pointer,
        pNormOutW: cute.Pointer,
        pNormOutB: cute.Pointer,
        pP: cute.Pointer,
        pG: cute.Pointer,
        pPBias: cute.Pointer | None,
        pGBias: cute.Pointer | None,
        pY: cute.Pointer,
        n: Int32,
    ):
        bidx, _, b = cute.arch.block_idx()
        lane, warp = tools.lane_and_warp()
        g, q = lane // 4, lane % 4
        blocks_row = cute.ceil_div(n, BLOCK)
        block = bidx * self.tile.warps + warp
        active = block < n * blocks_row
        i = cutlass.min(block // blocks_row, n - 1)
        j0 = (block % blocks_row) * BLOCK
        row = (Int64(b) * n + i) * n

        smem = cutlass.utils.SmemAllocator()
        elements = self.tile.shared_bytes(self.C, self.D) // 2
        storage = smem.allocate_tensor(BFloat16, cute.make_layout(elements), byte_alignment=128)
        sT = cute.make_tensor(
            storage.iterator + EARLY_STAGES * self.stage_elements,
            cute.make_layout((_VEC, BLOCK // _VEC, self.D, self.tile.warps), stride=(1, _VEC, BLOCK, BLOCK * self.D)),
        )[None, None, None, warp]
        self.load_t(pT, sT, Int64(b) * self.D, i, j0, n, lane)
        for s in cutlass.range_constexpr(EARLY_STAGES):
            self.load_stage(pG, pP, s, s % 2, storage)
        tArH = self.load_h(pX, pNormInW, pNormInB, row, j0, n, g, q)
        cute.arch.cp_async_wait_group(EARLY_STAGES)
        tArT = self.load_t_normalised(sT, pNormOutW, pNormOutB, n, lane, tArH)
        # as A fragments: ((e, half, khi), m, (step, chunk))
        fragment = cute.make_layout(
            ((2, 2, 2), 2, (2, self.C // 32)), stride=((1, self.C // 4, 2), self.C // 2, (4, _VEC))
        )
        tArH = cute.make_tensor(tArH.iterator, fragment)
        cute.arch.sync_threads()  # the other stages of the ring take the staging area over
        for s in cutlass.range_constexpr(EARLY_STAGES, self.tile.stages - 1):
            self.load_stage(pG, pP, s, s % 2, storage)

        tiled_mma = tools.warp_mma()
        tCrGate = cute.make_rmem_tensor(((2, 2), 2, 2), Float32)
        tCrValue = cute.make_rmem_tensor(((2, 2), 2, 2), Float32)
        tCrY = cute.make_rmem_tensor((2, 2, 2, 2, 2), BFloat16)  # (e, jj, c), half, m: 8 channels of 4 positions
        for index in cutlass.range(self.blocks_total, unroll=1):
            channel = index * 32 + 8 * q
            for c in cutlass.range_constexpr(2):
                stage = 2 * index + c
                cute.arch.cp_async_wait_group(self.tile.stages - 2)
                cute.arch.sync_threads()
                ahead = self.tile.stages - 1
                self.load_stage(pG, pP, stage + ahead, (c + ahead) % 2, storage)
                self.start(tCrGate, pGBias, channel + 4 * c)
                self.start(tCrValue, pPBias, channel + 4 * c)
                sG, sP = self.weight_views(storage, stage % self.tile.stages)
                for t in cutlass.range_constexpr(self.C // 32):
                    self.multiply(tiled_mma, tArH, sG, tCrGate, t, g, q)
                for t in cutlass.range_constexpr(self.D // 32):
                    self.multiply(tiled_mma, tArT, sP, tCrValue, t, g, q)
                self.gate(tCrGate, tCrValue, tCrY[None, None, c, None, None])
            for m in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    j = j0 + 16 * m + 8 * half + g
                    if active & (j < n):
                        mY = tools.vectors(pY, (row + j) * self.C + channel)
                        tY = cute.make_tensor(tCrY[None, None, None, half, m].iterator, cute.make_layout(_VEC))
                        cute.autovec_copy(tY, mY)

    @cute.jit
    def load_t(self, pT, sT, plane0, i, j0, n, lane) -> None:
        """Start the copies of this warp's t [D, 32 positions]; SMEM row 8m + 2q + e is channel 8q + 2m + e of 32."""
        n_padded = cute.ceil_div(n, PAD) * PAD
        plane = Int64(n) * n_padded
        chunk, row = lane % 4, lane // 4
        channel = plane0 + 8 * (row // 2) + row % 2
        mT = tools.vectors(pT, channel * plane + Int64(i) * n_padded + j0 + chunk * _VEC)
        for t in cutlass.range_constexpr(self.D // 32):
            for m in cutlass.range_constexpr(4):
                source = tools.vectors(mT.iterator, (32 * t + 2 * m) * plane)
                tools.copy_async(source, sT[None, chunk ^ (row // 2), 32 * t + 8 * m + row])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_h(self, pX, pNormW, pNormB, row, j0, n, g, q):
        """LayerNorm(x) of 32 positions as registers (8, C/32, rows); row 2m + half. Rows past N repeat N - 1."""
        tArH = cute.make_rmem_tensor((_VEC, self.C // 32, 4), BFloat16)
        for p in cutlass.range_constexpr(4):
            position = cutlass.min(j0 + 8 * p + g, n - 1)
            mX = tools.vectors(pX, (row + position) * self.C + q * _VEC, (self.C // 32, 32))
            for t in cutlass.range_constexpr(self.C // 32):
                cute.autovec_copy(mX[None, t], tArH[None, t, p])
        tools.layer_norm(tArH, pNormW, pNormB, q, n >> 31)
        return tArH

    @cute.jit
    def load_t_normalised(self, sT, pNormW, pNormB, n, lane, after):
        """LayerNorm(t) of 32 positions as A fragments ((e, half, khi), m, (step, chunk))."""
        chunks = self.D // 32
        fragment = cute.make_layout(((2, 2, 2), 2, (2, chunks)), stride=((1, 2, 4), self.D // 2, (_VEC, 2 * _VEC)))
        tArT = cute.make_rmem_tensor(fragment, BFloat16)
        # (8, chunks, (half, m)): within a chunk, (e, khi, step) is the order of the channels
        rows = cute.make_layout(((2, 2, 2), chunks, (2, 2)), stride=((1, 4, 8), 2 * _VEC, (2, self.D // 2)))
        half, khi, row = (lane >> 3) & 1, lane >> 4, lane & 7
        cute.arch.sync_warp()
        for m in cutlass.range_constexpr(2):
            for t in cutlass.range_constexpr(chunks):
                for s in cutlass.range_constexpr(2):
                    chunk = (2 * m + half) ^ (row // 2)
                    src = sT[None, chunk, 32 * t + 16 * s + 8 * khi + row]
                    tools.load_matrices(src, tArT[None, m, (s, t)], True)
        tRows = cute.make_tensor(tArT.iterator, rows)
        tools.layer_norm(tRows, pNormW, pNormB, lane % 4, n >> 31, after)
        return tArT

    def weight_views(self, storage: cute.Tensor, slot: Int32 | int) -> tuple[cute.Tensor, cute.Tensor]:
        """(gate, value) tiles (8, chunks, 16) of one stage of the ring."""
        base = storage.iterator + cute.assume(Int32(slot) * self.stage_elements, divby=_VEC)
        return tuple(
            cute.make_tensor(base + offset, cute.make_layout((_VEC, k // _VEC, STAGE_ROWS), stride=(1, _VEC, k)))
            for offset, k in ((0, self.C), (STAGE_ROWS * self.C, self.D))
        )

    @cute.jit
    def load_stage(self, pG, pP, stage, c: int, storage) -> None:
        """Start the copies of one stage, 16 gate rows and 16 value rows, and commit; nothing past the last stage.

        Stage 2i + c is half ``c`` of the 32 channels from 32 i on.
        """
        if stage < 2 * self.blocks_total:
            tidx, _, _ = cute.arch.thread_idx()
            sG, sP = self.weight_views(storage, stage % self.tile.stages)
            for pW, k, sW in ((pG, self.C, sG), (pP, self.D, sP)):
                rows = self.threads // (k // _VEC)
                chunk, row = tidx % (k // _VEC), tidx // (k // _VEC)
                for r in cutlass.range_constexpr(STAGE_ROWS // rows):
                    to = row + r * rows
                    jj, g = to // 8, to % 8
                    channel = (stage // 2) * 32 + 8 * (g // 2) + 4 * c + 2 * jj + g % 2
                    source = tools.vectors(pW, channel * k + chunk * _VEC)
                    tools.copy_async(source, sW[None, tools.weight_chunk(chunk, to), to])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def start(self, tCr, pBias, channel) -> None:
        """Start an accumulator at the bias of its 4 channels."""
        if cutlass.const_expr(pBias is None):
            tCr.fill(0.0)
        else:
            mBias = cute.make_tensor(pBias + channel, cute.make_layout((2, 2)))
            for jj in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    tCr[(e, None), None, jj].fill(mBias[e, jj].to(Float32))

    @cute.jit
    def multiply(self, tiled_mma, tAr, sW, tCr, t: int, g, q) -> None:
        """Accumulate 32 positions times 16 weight rows over the 32 channels of chunk ``t``."""
        tBr = cute.make_rmem_tensor((_VEC, 2), BFloat16)
        for jj in cutlass.range_constexpr(2):
            cute.autovec_copy(sW[None, tools.weight_chunk(4 * t + q, g), 8 * jj + g], tBr[None, jj])
        tCrB = cute.make_tensor(tBr.iterator, cute.make_layout(((2, 2), 2, 2), stride=((1, 2), _VEC, 4)))
        cute.gemm(tiled_mma, tCr, tAr[None, None, (None, t)], tCrB, tCr)

    @cute.jit
    def gate(self, tCrGate, tCrValue, tCrY) -> None:
        """y = sigmoid(gate) * value, rounded to bf16, into ``tCrY`` (e, jj, half, m)."""
        for m in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                for jj in cutlass.range_constexpr(2):
                    pair = tools.sigmoid_pair(tCrGate[(0, half), m, jj], tCrGate[(1, half), m, jj])
                    for e in cutlass.range_constexpr(2):
                        tCrY[e, jj, half, m] = (pair[e] * tCrValue[(e, half), m, jj]).to(BFloat16)


def entry(spec: KernelSpec) -> tuple[Any, int]:
    """The host function and its number of pointers."""
    return Finalize(spec), 9 + 2 * spec["biases"]
