"""contract: ab -> t, one N x N x N product per batch and channel.

    outgoing  t[i, j] = sum_k a[i, k] b[j, k]       incoming  t[i, j] = sum_k a[k, i] b[k, j]

ab [2, B, D, N, Np] and t [B, D, N, Np] bf16, fp32 accumulation. Columns N .. Np of ab are zeros
(project writes them) and come out as zeros in t. Rows past N are zero-filled by cp.async.

Outgoing reads both operands K-contiguous through ldmatrix, incoming both M/N-contiguous through
ldmatrix.trans; the loop is one. A quad exchanges its four accumulator columns at the end, so that t
leaves in 16-byte stores of whole sectors. Tiles of one channel are neighbours in the grid: its
operand planes stay in L2.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from kernel_factory.families.trimul_mma import mma_tools as tools
from kernel_factory.families.trimul_mma.plan import PAD, ContractTile
from kernel_factory.family import KernelSpec

_VEC = tools.VECTOR


class Operand:
    """One operand tile in SMEM: its layout, the threads that fill it and the lanes that read it.

    ``extent`` rows of M or N by ``bk`` of K. ``is_a`` only decides which half of an ldmatrix.x4 comes first.
    """

    def __init__(self, extent: int, bk: int, threads: int, k_major: bool, is_a: bool) -> None:
        self.extent, self.bk, self.k_major, self.is_a = extent, bk, k_major, is_a
        self.rows, contiguous = (extent, bk) if k_major else (bk, extent)
        self.chunks = contiguous // _VEC
        self.line = min(self.chunks, 8)  # chunks in one SMEM row: at most 128 bytes
        self.rows_per_pass = threads // self.chunks
        self.elements = extent * bk

    def view(self, pointer: cute.Pointer, stages: int, stage_elements: int) -> cute.Tensor:
        """(8, (line, lines), rows, stages): rows wider than 128 bytes are split into panels."""
        width = self.line * _VEC
        panels = self.chunks // self.line
        layout = cute.make_layout(
            (_VEC, (self.line, panels), self.rows, stages),
            stride=(1, (_VEC, width * self.rows), width, stage_elements),
        )
        return cute.make_tensor(pointer, layout)

    def key(self, row: Int32) -> Int32:
        """The XOR on the chunk that makes eight consecutive rows hit eight bank groups."""
        return row & 7 if self.line == 8 else (row >> 1) & (self.line - 1)

    def lane_offset(self, lane: Int32) -> tuple[Int32, Int32]:
        """(row, chunk) of a lane inside the 16 x 16 block that one ldmatrix.x4 reads."""
        low, high = (lane >> 3) & 1, lane >> 4
        rows_first = self.is_a == self.k_major
        return (lane & 7) + 8 * (low if rows_first else high), (high if rows_first else low)


class Contract:
    """Host entry and kernel of one specialisation. Scalars: N, B."""

    def __init__(self, spec: KernelSpec) -> None:
        self.D, self.outgoing = spec["D"], spec["direction"] == "outgoing"
        self.tile = tile = ContractTile.of(spec)
        self.threads = tile.warps_m * tile.warps_n * tools.WARP
        self.warp_m, self.warp_n = tile.tile_m // tile.warps_m, tile.tile_n // tile.warps_n
        self.a = Operand(tile.tile_m, tile.bk, self.threads, self.outgoing, True)
        self.b = Operand(tile.tile_n, tile.bk, self.threads, self.outgoing, False)
        self.stage_elements = self.a.elements + self.b.elements

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        pAB, pT, n, batch, stream = arguments
        tiles = cute.ceil_div(n, self.tile.tile_m) * cute.ceil_div(n, self.tile.tile_n)
        self.kernel(pAB, pT, n, batch).launch(
            grid=(tiles, self.D, batch),
            block=(self.threads, 1, 1),
            smem=self.tile.shared_bytes(),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, pAB: cute.Pointer, pT: cute.Pointer, n: Int32, batch: Int32):
        bidx, d, b = cute.arch.block_idx()
        lane, warp = tools.lane_and_warp()
        tiles_n = cute.ceil_div(n, self.tile.tile_n)
        m0, n0 = (bidx // tiles_n) * self.tile.tile_m, (bidx % tiles_n) * self.tile.tile_n
        warp_m0 = (warp // self.tile.warps_n) * self.warp_m
        warp_n0 = (warp % self.tile.warps_n) * self.warp_n
        n_padded = cute.ceil_div(n, PAD) * PAD
        plane = Int64(n) * n_padded
        channel = Int64(b) * self.D + d
        pA = pAB + cute.assume(channel * plane, divby=_VEC)
        pB = pAB + cute.assume((channel + Int64(batch) * self.D) * plane, divby=_VEC)

        stages = cutlass.const_expr(self.tile.stages)
        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate_tensor(BFloat16, cute.make_layout(stages * self.stage_elements), byte_alignment=128)
        sA = self.a.view(storage.iterator, stages, self.stage_elements)
        sB = self.b.view(storage.iterator + self.a.elements, stages, self.stage_elements)

        k_tiles = cute.ceil_div(n, self.tile.bk)
        for s in cutlass.range_constexpr(stages - 1):
            if s < k_tiles:
                self.load_stage(pA, pB, sA, sB, m0, n0, s, s, n, n_padded)
            cute.arch.cp_async_commit_group()

        tiled_mma = tools.warp_mma()
        tCrC = cute.make_rmem_tensor(((2, 2), self.warp_m // 16, self.warp_n // 8), Float32)
        tCrC.fill(0.0)
        read, write = Int32(0), Int32(stages - 1)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            ahead = k_tile + (stages - 1)
            if ahead < k_tiles:
                self.load_stage(pA, pB, sA, sB, m0, n0, ahead, write, n, n_padded)
            cute.arch.cp_async_commit_group()
            tCsA, tCsB = sA[None, None, None, read], sB[None, None, None, read]
            for k_block in cutlass.range_constexpr(self.tile.bk // 16):
                tCrA = self.load_fragment(self.a, tCsA, warp_m0, self.warp_m, k_block, lane)
                tCrB = self.load_fragment(self.b, tCsB, warp_n0, self.warp_n, k_block, lane)
                tCrA = cute.make_tensor(tCrA.iterator, cute.make_layout(((2, 2, 2), self.warp_m // 16)))
                tCrB = cute.make_tensor(tCrB.iterator, cute.make_layout(((2, 2), self.warp_n // 8)))
                cute.gemm(tiled_mma, tCrC, tCrA, tCrB, tCrC)
            write = read
            read = cutlass.select_(read == stages - 1, Int32(0), read + 1)

        self.store(pT + cute.assume(channel * plane, divby=_VEC), tCrC, m0 + warp_m0, n0 + warp_n0, lane, n, n_padded)

    @cute.jit
    def load_stage(self, pA, pB, sA, sB, m0, n0, k_tile, slot, n, n_padded) -> None:
        """Start the copies of K tile ``k_tile`` of both operands into stage ``slot``."""
        k0 = k_tile * self.tile.bk
        self.load_operand(self.a, pA, sA[None, None, None, slot], m0, k0, n, n_padded)
        self.load_operand(self.b, pB, sB[None, None, None, slot], n0, k0, n, n_padded)

    @cute.jit
    def load_operand(self, operand: cutlass.Constexpr, pSrc, sDst, extent0, k0, n, n_padded) -> None:
        """One tile of one operand. Rows past N and columns past Np become zeros and read nothing."""
        tidx, _, _ = cute.arch.thread_idx()
        chunk, row = tidx % operand.chunks, tidx // operand.chunks
        row0, column0 = (extent0, k0) if cutlass.const_expr(operand.k_major) else (k0, extent0)
        column = column0 + chunk * _VEC
        column_valid = column < n_padded
        column = cutlass.min(column, n_padded - _VEC)
        to_chunk = chunk ^ operand.key(row)  # rows_per_pass is a multiple of 8: the key is that of every pass
        for r in cutlass.range_constexpr(operand.rows // operand.rows_per_pass):
            to = row + r * operand.rows_per_pass
            source = tools.vectors(pSrc, Int64(cutlass.min(row0 + to, n - 1)) * n_padded + column)
            tools.copy_async(source, sDst[None, to_chunk, to], (row0 + to < n) & column_valid)

    @cute.jit
    def load_fragment(self, operand: cutlass.Constexpr, sTile, extent0, extent: int, k_block: int, lane):
        """``extent`` / 16 blocks of 16 x 16 of a warp as ldmatrix leaves them: (8, extent/16)."""
        row, chunk = operand.lane_offset(lane)
        key = operand.key(row)
        tCr = cute.make_rmem_tensor((_VEC, extent // 16), BFloat16)
        for block in cutlass.range_constexpr(extent // 16):
            if cutlass.const_expr(operand.k_major):
                at_row, at_chunk = extent0 + 16 * block + row, (chunk ^ key) ^ (2 * k_block)
            else:
                at_row, at_chunk = 16 * k_block + row, (extent0 // _VEC + 2 * block + chunk) ^ key
            tools.load_matrices(sTile[None, at_chunk, at_row], tCr[None, block], not operand.k_major)
        return tCr

    @cute.jit
    def store(self, pT, tCrC, row0, column0, lane, n, n_padded) -> None:
        """Round to bf16 and write rows below N, columns below Np: 16 bytes a lane, 64 a quad."""
        g, q = lane // 4, lane % 4
        tCrT = cute.make_rmem_tensor(tCrC.layout, BFloat16)
        tCrT.store(tCrC.load().to(BFloat16))
        tCrWords = cute.recast_tensor(tCrT, Uint32)
        tOut = cute.make_rmem_tensor(4, Uint32)
        for m in cutlass.range_constexpr(self.warp_m // 16):
            for half in cutlass.range_constexpr(2):
                i = row0 + 16 * m + 8 * half + g
                for group in cutlass.range_constexpr(self.warp_n // 32):
                    words = [tCrWords[(0, half), m, 4 * group + w] for w in range(4)]
                    for w, word in enumerate(tools.quad_transpose(words, lane)):
                        tOut[w] = word
                    j = column0 + 32 * group + 8 * q
                    if (i < n) & (j < n_padded):
                        mOut = tools.vectors(pT, Int64(i) * n_padded + j)
                        cute.autovec_copy(cute.recast_tensor(tOut, BFloat16), mOut)


def entry(spec: KernelSpec) -> tuple[Any, int]:
    """The host function and its number of pointers."""
    return Contract(spec), 2
