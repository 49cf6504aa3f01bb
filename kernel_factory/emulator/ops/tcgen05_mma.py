"""tcgen05.mma (PTX ISA 9.7.16.10): dense products by one CTA or a pair.

One thread issues it; the product runs in its CTA's queue (tensor_core). Row r of the result lies in the TMEM lanes of
9.7.16.5 ("data path layout"): M = 128 (or 256 of a pair) in lane r, M = 64 in lane 32 (r // 16) + r % 16, M = 128 of
a pair in lane r % 64, and in lane 64 + r % 64 for the upper half of the columns. A CTA of a pair holds half of the
rows of A and half of the rows of B.

Block-scaled kinds (mxf8f6f4, mxf4, mxf4nvf4) take scale factors from TMEM: the word of row r of an operand is in lane
r % 32, column r // 32 from the address on, and the descriptor names the bytes. Sparse and .ws forms are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..ptx.records import Address, Immediate, Instruction, Vector
from ..registry import emits, runtime
from ..tensor_core import Work
from ..tensor_descriptors import SIZES, DescriptorError, InstructionDescriptor, instruction, scaled_instruction
from ..tensor_numbers import decode, multiply, read_result, scale_factors, write_result
from ..tensor_operands import Matrix, SharedOperand, shared_operand
from ..tmem import Area
from .tcgen05_alloc import cta_group
from .tcgen05_ldst import tmem_address

_SCALED = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}
_VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 2, "block16": 4}
_REFUSED = {
    "sp": "sparse products",
    "ws": "the weight-stationary form",
    "ashift": "the shift of A's rows",
}


@emits("tcgen05.mma", writes=False)
def product(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """[d], a-descriptor or [a], b-descriptor, instruction descriptor{, lanes to leave}, use d{, scale of d}."""
    for name, what in _REFUSED.items():
        if name in mods.left:
            raise e.fail(
                f"{what} of tcgen05.mma (.{name}) are not emulated; add them to ops/tcgen05_mma.py with a test"
            )
    group = cta_group(e, mods)
    kind = mods.one("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8", *(f"kind::{k}" for k in _SCALED))[6:]
    mods.ignore("collector::")
    if kind in _SCALED:
        _scaled(e, ins, mods, kind, group)
        return
    if len(ins.operands) < 5 or not isinstance(ins.operands[0], Address):
        raise e.fail(f"expected [d], a, b, instruction descriptor and a predicate, found {len(ins.operands)} operands")
    d, a, b, descriptor, *rest = ins.operands
    masks = rest.pop(0) if isinstance(rest[0], Vector) else None
    if masks and len(masks.items) != 4 * group:
        raise e.fail(f"the mask of output lanes has {len(masks.items)} words, cta_group::{group} wants {4 * group}")
    if not rest or len(rest) > 2 or (len(rest) == 2 and not isinstance(rest[1], Immediate)):
        raise e.fail("expected a predicate, and at most a constant that scales d")
    scale = rest[1].value if len(rest) == 2 else 0
    if not 0 <= scale <= 15 or (scale and kind not in ("f16", "tf32")):
        raise e.fail("scale-input-d is 0 to 15, with kind::f16 and kind::tf32 only")
    in_tmem = isinstance(a, Address)
    first = tmem_address(e, a) if in_tmem else e.value(a, "u64")
    words = [first, e.value(b, "u64"), e.value(descriptor, "u32"), *(e.values(masks, "u32") if masks else ())]
    form = e.static(Form(kind=kind, group=group, scale=scale, a_in_tmem=in_tmem))
    e.line(_call(e, form, [tmem_address(e, d), *words], e.value(rest[0], "bool")))


def _scaled(e: Emitter, ins: Instruction, mods: Modifiers, kind: str, group: int) -> None:
    """[d], a, b, instruction descriptor, [factors of a], [factors of b], use d."""
    mods.one("block_scale")
    named = mods.take(*_VECTORS)
    count = _VECTORS[named] if named else {"mxf8f6f4": 1, "mxf4": 2}.get(kind, 0)
    if named in ("block16", "block32"):
        count = {"mxf8f6f4": 1}.get(kind, 64 // int(named[5:]))
    if count not in _SCALED[kind]:
        raise e.fail(f"kind::{kind} takes {' or '.join(map(str, _SCALED[kind]))} scale factors a row, not {count}")
    d, a, b, descriptor, factors_a, factors_b, use = e.operands(7)
    if not all(isinstance(x, Address) for x in (d, factors_a, factors_b)) or isinstance(a, Address):
        raise e.fail("block-scaled products are emulated with A in shared memory and d and factors in brackets")
    words = [tmem_address(e, d), e.value(a, "u64"), e.value(b, "u64"), e.value(descriptor, "u32")]
    words += [tmem_address(e, factors_a), tmem_address(e, factors_b)]
    form = e.static(Form(kind=kind, group=group, scale=count, a_in_tmem=False))
    e.line(_call(e, form, words, e.value(use, "bool")))


def _call(e: Emitter, form: str, words: list[str], use: str) -> str:
    return f"tensor_product({e.issue()}, {form}, [{', '.join(words)}], {use})"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the opcode says: the kind, CTAs, where A lies, and the scale of d or the scale factors of a row."""

    kind: str
    group: int
    scale: int
    a_in_tmem: bool

    def descriptor(self, word: int) -> InstructionDescriptor:
        """The instruction descriptor, decoded for this kind; DescriptorError where it does not fit."""
        if self.kind in _SCALED:
            return scaled_instruction(word, self.kind, self.group, self.scale)
        return instruction(word, self.kind, self.group)


@runtime
def tensor_product(issue: Issue, opcode: Form, words: list[np.ndarray], use: np.ndarray) -> None:
    """``words``: d, a, b, the instruction descriptor, then lanes that d leaves alone, or addresses of scale factors."""
    M = issue.M
    rows = zip(*(issue.each(word).tolist() for word in words), strict=True)
    for i, (row, added) in enumerate(zip(rows, issue.each(use).tolist(), strict=True)):
        try:
            work = _work(M, int(issue.threads[i]), issue.line, opcode, row, added)
        except DescriptorError as wrong:
            cure = "build the descriptor for this kind, shape and layout"
            raise issue.fault("tcgen05-descriptor", str(wrong), cure, i) from None
        if M.count:
            M.count.tensor_product(work.form.key, issue.line)
        if M.tensor.races:
            M.tensor.races.product(work)
        M.tensor.issue(work)


def _work(M: object, thread: int, line: int, opcode: Form, words: tuple[int, ...], use: bool) -> Product:
    """Check the operands of one issuing thread and describe its product."""
    d, a, b, descriptor, *masks = words
    form, group, in_tmem = opcode.descriptor(descriptor), opcode.group, opcode.a_in_tmem
    factors = [] if form.scale is None else masks
    cta = int(M.cta[thread])
    ctas = [cta] if group == 1 else sorted((cta, M.tensor.memory.peer(cta)), key=lambda c: M.cta_rank[c])
    rows, columns = form.m // group, form.n // group
    layout = data_path(form.m, form.n, group)
    lane, column = d >> 16, d & 0xFFFF
    if lane and not (form.m == 64 and lane == 16):
        raise DescriptorError(f"the result starts at TMEM lane {lane}; M = {form.m} starts at lane 0 (M = 64: or 16)")
    width = layout[0].columns
    inside = partial(M.tensor.memory.check, np.array(ctas), line=line, thread=thread)
    inside(Area(lane=lane, column=column, columns=width))
    if in_tmem:
        if form.a_mn_major:
            raise DescriptorError("A in TMEM is K-major")
        if a >> 16 != lane:
            raise DescriptorError(f"A starts at TMEM lane {a >> 16}, the result at lane {lane}")
        inside(Area(lane=lane, column=a & 0xFFFF, columns=8))
        if column - 8 < a & 0xFFFF < column + width:
            raise DescriptorError(f"A at TMEM column {a & 0xFFFF} overlaps the result of {width} columns at {column}")
        left = a
    else:
        matrix = Matrix(word=a, rows=rows, mn_major=form.a_mn_major, size=SIZES[form.a_type])
        left = shared_operand(M, matrix, line, thread)
    matrix = Matrix(word=b, rows=columns, mn_major=form.b_mn_major, size=SIZES[form.b_type])
    right = shared_operand(M, matrix, line, thread)
    for address, extent in zip(factors, (rows, form.n), strict=False):
        inside(Area(column=address & 0xFFFF, columns=-(-extent // 32)))
        if address >> 16 & 0x3FFF:  # the top two bits name the byte once more
            raise DescriptorError(f"scale factors start at TMEM lane {address >> 16 & 0x3FFF}; they start at lane 0")
    cells = [(c, column, column + width) for c in ctas]
    cells += [(c, a & 0xFFFF, (a & 0xFFFF) + 8) for c in ctas] if in_tmem else []
    return Product(
        cta=cta, thread=thread, line=line, cells=cells, ctas=ctas, form=form, lane=lane, column=column, left=left,
        right=right, keep=_kept([] if factors else masks), use=use, scale=0 if factors else opcode.scale, layout=layout,
        factors=[f & 0xFFFF for f in factors],
    )  # fmt: skip


def _kept(masks: list[int]) -> np.ndarray | None:
    """(CTA, lane) that a product must not change, from the words of disable-output-lane."""
    if not any(masks):
        return None
    bits = np.array(masks, np.uint32)[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    return bits.astype(bool).reshape(-1, 128)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a CTA's part of the result, the lane of the first, and the columns of the product that go there."""

    row: int
    rows: int
    lane: int
    first: int
    columns: int


def data_path(m: int, n: int, group: int) -> list[Piece]:
    """Where a CTA's part of an M x N result lies."""
    if group == 2 and m == 128:
        return [Piece(row=0, rows=64, lane=64 * h, first=h * n // 2, columns=n // 2) for h in (0, 1)]
    if m == 64:
        return [Piece(row=16 * i, rows=16, lane=32 * i, first=0, columns=n) for i in range(4)]
    return [Piece(row=0, rows=128, lane=0, first=0, columns=n)]


@dataclass(kw_only=True)
class Product(Work):
    """One tcgen05.mma: D = A B^T, or D = A B^T + D / 2**scale."""

    ctas: list[int]
    form: InstructionDescriptor
    lane: int
    column: int
    left: SharedOperand | int
    right: SharedOperand
    keep: np.ndarray | None
    use: bool
    scale: int
    layout: list[Piece]
    factors: list[int]

    def land(self, M: object) -> None:
        form = self.form
        packed = " packed" if form.packed else ""
        b = np.concatenate([self.right.read(M, c, form.b_type + packed) for c in self.ctas])
        b = -b if form.negate_b else b
        for half, cta in enumerate(self.ctas):
            whole = None
            if isinstance(self.left, SharedOperand):
                a = self.left.read(M, cta, form.a_type + packed)
                a = -a if form.negate_a else a
                whole = multiply(a, b) if form.scale is None else self._scaled(M, cta, a, b)
            for piece in self.layout:
                if whole is None:
                    a = self._from_tmem(M, cta, piece)
                    part = multiply(a, b[piece.first : piece.first + piece.columns])
                else:
                    part = whole[piece.row : piece.row + piece.rows, piece.first : piece.first + piece.columns]
                self._write(M, cta, half, piece, part)

    def _scaled(self, M: object, cta: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Both operands times the factors of their rows; each CTA holds those of its rows of A and of all of B."""
        scale, both = self.form.scale, []
        for x, column, first in zip((a, b), self.factors, (scale.a_byte, scale.b_byte), strict=True):
            words = M.tensor.memory.data[cta, :32, column : column - (-x.shape[0] // 32)].T.reshape(-1)[: x.shape[0]]
            factors = scale_factors(words, scale.type, first, scale.count)
            both.append(x * np.repeat(factors, x.shape[1] // scale.count, axis=1))
        return multiply(*both)

    def _from_tmem(self, M: object, cta: int, piece: Piece) -> np.ndarray:
        lane, column = self.lane + piece.lane, self.left & 0xFFFF
        words = np.ascontiguousarray(M.tensor.memory.data[cta, lane : lane + piece.rows, column : column + 8])
        a = decode(words.view(np.uint8), self.form.a_type)
        return -a if self.form.negate_a else a

    def _write(self, M: object, cta: int, half: int, piece: Piece, part: np.ndarray) -> None:
        lanes = slice(self.lane + piece.lane, self.lane + piece.lane + piece.rows)
        cells = M.tensor.memory.data[cta, lanes, self.column : self.column + piece.columns]
        if self.use:
            before = read_result(cells, self.form.d_type)
            part = part + (before if not self.scale else before * part.dtype.type(0.5**self.scale))
        words = write_result(part, self.form.d_type, self.form.saturate)
        if self.keep is not None:
            words = np.where(self.keep[half, lanes, None], cells, words)
        cells[...] = words
