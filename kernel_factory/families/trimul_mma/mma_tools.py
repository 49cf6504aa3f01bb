"""Device-side pieces that the three kernels share: fragments, LayerNorm, sigmoid, 16-byte copies.

The permuted-K fragment
-----------------------
``mma.m16n8k16`` contracts over 16 slots; nothing says which k sits in which slot as long as A
and B agree. Over 32 consecutive k, quad lane q takes k = 8q .. 8q + 7 (16 bytes) and feeds
element 4s + 2h + e of them to step s, slot 8h + 2q + e. A row of a K-contiguous operand in
*global* memory is then a fragment as it is loaded: four lanes read 64 bytes of one row, a
LayerNorm reduces over the quad with two shuffles, and the normalised row never touches SMEM.
The other operand is read from SMEM by plain 16-byte loads instead of ldmatrix, at the same
wavefronts per byte.

A SMEM tensor is (8, chunks, rows, ...): 16-byte vectors first, so that every access is one
aligned vector; the XOR that spreads chunks over the banks is written where the chunk is indexed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

VECTOR = 8
"""bf16 elements in 16 bytes."""
WARP = 32
EPS = 1e-5
_LOG2E = 1.4426950408889634
_EXPONENT_LIMIT = 62.0  # two factors (1 + 2**62) multiply to 2**124: no overflow, no flushed reciprocal


def warp_mma() -> cute.TiledMma:
    """One warp's m16n8k16, bf16 in, fp32 out."""
    return cute.make_tiled_mma(cute.nvgpu.warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))


def lane_and_warp() -> tuple[Int32, Int32]:
    """(lane, warp). The warp index is made uniform for the compiler."""
    tidx, _, _ = cute.arch.thread_idx()
    return tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)


def vectors(pointer: cute.Pointer, offset: Int64 | int, *modes: tuple[int | Int32, int | Int64]) -> cute.Tensor:
    """A tensor (8, *shape) of 16-byte vectors at ``pointer + offset``; ``modes`` are (extent, stride) in elements.

    ``offset`` and every dynamic stride must be multiples of 8 elements.
    """
    shape = (VECTOR, *(extent for extent, _ in modes))
    stride = (1, *(s if isinstance(s, int) else cute.assume(s, divby=VECTOR) for _, s in modes))
    base = pointer if isinstance(offset, int) and offset == 0 else pointer + cute.assume(offset, divby=VECTOR)
    return cute.make_tensor(base, cute.make_layout(shape, stride=stride))


def copy_async(src: cute.Tensor, dst: cute.Tensor, valid: Boolean | bool = True) -> None:
    """cp.async of one 16-byte vector, past L1; writes zeros where ``valid`` is false."""
    nbytes = None if valid is True else cutlass.select_(valid, Int32(16), Int32(0))
    cute.arch.cp_async_shared_global(dst.iterator, src.iterator, 16, "cg", cp_size=nbytes)


def load_matrices(src: cute.Tensor, dst: cute.Tensor, transpose: bool) -> None:
    """ldmatrix.x4: ``src`` is this lane's row of 8 elements, ``dst`` its 8 elements of the four matrices."""
    atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(transpose, 4), BFloat16)
    as_fragment = cute.make_layout((VECTOR, 1))
    cute.copy(atom, cute.make_tensor(src.iterator, as_fragment), cute.make_tensor(dst.iterator, as_fragment))


def quad_sum(value: Float32) -> Float32:
    """The sum over the four lanes of a quad, in each of them."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


def row_statistics(tRow: cute.Tensor) -> tuple[Float32, Float32]:
    """(mean, 1/sqrt(variance + eps)) of a row spread over a quad: fp32, the variance about the mean."""
    inverse = 1.0 / (4 * cute.size(tRow))
    tX = tRow.load().to(Float32)
    mean = quad_sum(tX.reduce(cute.ReductionOp.ADD, 0.0, 0)) * inverse
    tX = tX - mean
    variance = quad_sum((tX * tX).reduce(cute.ReductionOp.ADD, 0.0, 0)) * inverse
    return mean, cute.math.rsqrt(variance + EPS, fastmath=True)


def layer_norm(
    tX: cute.Tensor,
    pWeight: cute.Pointer,
    pBias: cute.Pointer,
    quad_lane: Int32,
    zero: Int32,
    after: cute.Tensor | None = None,
) -> None:
    """LayerNorm of rows spread over a quad, in place, rounded once to bf16. ``tX`` is (elements, chunks, rows).

    Two rows at a time, and no more: left alone, ptxas computes the statistics of all rows first and
    spills their fp32 values. ``zero`` orders the pairs, the first one after the rows ``after`` where
    they are given (see ``order_after``); the warp barrier has the parameters loaded again rather than
    kept in fp32.
    """
    _, chunks, rows = tX.shape
    for first in range(0, cute.size(rows), 2):
        pair = (first, first + 1)
        cute.arch.sync_warp()
        if first:
            order_after(tX, pair, tX, zero)
        elif after is not None:
            order_after(tX, pair, after, zero)
        statistics = [(r, *row_statistics(tX[None, None, r])) for r in pair]
        for t in range(chunks):
            weight, bias = (norm_chunk(pParam, quad_lane * VECTOR + t * 32) for pParam in (pWeight, pBias))
            for r, mean, rstd in statistics:
                tChunk = tX[None, t, r]
                h = (tChunk.load().to(Float32).reshape((VECTOR,)) - mean) * rstd * weight + bias
                tChunk.store(h.to(BFloat16).reshape(tChunk.shape))


def order_after(tLater: cute.Tensor, pair: tuple[int, int], tEarlier: cute.Tensor, zero: Int32) -> None:
    """Make every word of a pair of rows depend on the two rows done before: later | (earlier & zero), one LOP3.

    The earlier rows are those before the pair, or the last two of another tensor. ``zero`` is 0 at run
    time and unknown to the compiler. A data dependence is the only fence that ptxas keeps.
    """
    for r in pair:
        later = cute.recast_tensor(tLater[None, None, r], Uint32)
        before = (r - 2) % cute.size(tEarlier, mode=[2])
        earlier = cute.recast_tensor(tEarlier[None, None, before], Uint32)
        for w in range(cute.size(later)):
            later[w] = later[w] | (earlier[w % cute.size(earlier)] & Uint32(zero))


def norm_chunk(pParam: cute.Pointer, channel: Int32) -> cute.TensorSSA:
    """Eight LayerNorm parameters from ``channel`` on, as fp32."""
    tParam = cute.make_rmem_tensor(VECTOR, BFloat16)
    cute.autovec_copy(vectors(pParam, channel), tParam)
    return tParam.load().to(Float32)


def sigmoid_pair(x0: Float32, x1: Float32) -> tuple[Float32, Float32]:
    """Two sigmoids for two ex2 and one reciprocal: 1/d0 = d1/(d0 d1). NaN stays NaN.

    Exact to fp32 rounding down to sigmoid(-43); below, the result stays at 2**-62. Four gates on one
    reciprocal would stop at sigmoid(-21), which a gate bias of -20 passes.
    """
    d0, d1 = (
        1.0 + cute.math.exp2(-cute.arch.fmax(x * _LOG2E, -_EXPONENT_LIMIT, nan=True), fastmath=True) for x in (x0, x1)
    )
    r = cute.arch.rcp_approx(d0 * d1)
    return r * d1, r * d0


def weight_chunk(chunk: Int32, row: Int32) -> Int32:
    """The bank swizzle of a weight tile read by 16-byte loads.

    A quarter warp reads chunks 4t .. 4t + 3 of an even and an odd row; bit 2 keeps the two apart.
    """
    return chunk ^ ((row & 1) << 2)


def quad_transpose(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """4x4 transposition among the lanes of a quad: afterwards lane q holds word q of lanes 0 .. 3."""
    for bit in (1, 2):
        odd = (lane & bit) != 0
        for low in [i for i in range(4) if not i & bit]:
            high = low | bit
            sent = cutlass.select_(odd, words[low], words[high])
            received = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            words[low], words[high] = (
                cutlass.select_(odd, received, words[low]),
                cutlass.select_(odd, words[high], received),
            )
    return words
