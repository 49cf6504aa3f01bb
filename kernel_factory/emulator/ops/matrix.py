"""ldmatrix, stmatrix and mma.sync.

A run of mma instructions becomes few matrix products: the fragments of a run are assembled once, products that
cover a full grid of A and B fragments are one batched product a warp, and a chain over k accumulates in matrix
form. Registers that hold such a result are written only when something reads them.

The fragment layouts are those of PTX ISA 9.7.14 for m16n8k8 and m16n8k16 with 16-bit inputs and f32 accumulators.
The sum is float32 in BLAS's order, not the tensor core's: exact for small integers, else within f32 rounding.
"""

from __future__ import annotations

import re

import numpy as np

from ..emitter import Emitter, Modifiers
from ..errors import PtxError
from ..issue import Issue
from ..ptx.records import Immediate, Instruction, Register, Vector
from ..registry import emits, runtime
from .memory_access import shared_flat


@emits("ldmatrix", collective=32)
def load_matrix(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """ldmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16."""
    count, trans = _matrix_mods(e, ins, mods)
    dst, source = e.operands(2)
    items = dst.items if isinstance(dst, Vector) else (dst,)
    if len(items) != count:
        raise e.fail(f"ldmatrix.x{count} needs {count} registers, found {len(items)}")
    name = e.temp()
    e.line(f"{name} = matrix_load({e.issue()}, {e.shared_place(source)}, {count}, {trans})")
    for i, item in enumerate(items):
        e.set(item, f"{name}[{i}]", "u32")


@emits("stmatrix", collective=32, writes=False)
def store_matrix(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """stmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16."""
    count, trans = _matrix_mods(e, ins, mods)
    target, source = e.operands(2)
    values = e.values(source, "u32")
    if len(values) != count:
        raise e.fail(f"stmatrix.x{count} needs {count} registers, found {len(values)}")
    e.line(f"matrix_store({e.issue()}, {e.shared_place(target)}, [{', '.join(values)}], {trans})")


def _matrix_mods(e: Emitter, ins: Instruction, mods: Modifiers) -> tuple[int, bool]:
    mods.type("b16")
    for name in ("sync", "aligned", "m8n8"):
        mods.one(name)
    mods.one("shared", "shared::cta")
    if ins.guard:
        raise e.fail(f"a guarded {ins.opcode} is not emulated")
    return int(mods.one("x1", "x2", "x4")[1:]), bool(mods.take("trans"))


def _with_rows(issue: Issue, count: int) -> Issue:
    """The first 8*count lanes of every warp, which name the rows."""
    return issue if count == 4 else issue.narrowed(np.flatnonzero(np.arange(issue.n) % 32 < 8 * count))


@runtime
def matrix_load(issue: Issue, place: tuple, count: int, trans: bool) -> np.ndarray:
    M, naming = issue.M, _with_rows(issue, count)
    flat = shared_flat(naming, place, 16)
    rows = flat.reshape(-1, 8 * count)
    warps = rows.shape[0]
    if M.race:
        M.race.read(naming.threads, flat, 16, issue.line, whole_warp=True)
    if M.count:
        M.count.shared(naming, flat, 16, "ldmatrix")
    d = M.shared_views[16].take(rows >> 4)
    if trans:
        d = d.view(np.uint16).reshape(warps, count, 8, 8).transpose(1, 0, 3, 2)
        return np.ascontiguousarray(d).view(np.uint32).reshape(count, -1)
    return np.ascontiguousarray(d.view(np.uint32).reshape(warps, count, 32).transpose(1, 0, 2)).reshape(count, -1)


@runtime
def matrix_store(issue: Issue, place: tuple, values: list[np.ndarray], trans: bool) -> None:
    M, count = issue.M, len(values)
    naming = _with_rows(issue, count)
    flat = shared_flat(naming, place, 16)
    rows = flat.reshape(-1, 8 * count)
    warps = rows.shape[0]
    if M.race:
        M.race.write(naming.threads, flat, 16, issue.line, whole_warp=True)
    if M.count:
        M.count.shared(naming, flat, 16, "stmatrix")
    d = np.stack([np.broadcast_to(v, issue.n) for v in values]).reshape(count, warps, 32).transpose(1, 0, 2)
    d = np.ascontiguousarray(d)
    if trans:
        d = np.ascontiguousarray(d.view(np.uint16).reshape(warps, count, 8, 8).transpose(0, 1, 3, 2))
    M.shared_views[16][rows >> 4] = d.view(np.complex128).reshape(warps, -1)


# -- mma --------------------------------------------------------------------------------------------------------------
_SHAPE = re.compile(r"m16n8k(8|16)$")


class Accumulator:
    """The accumulators of a grid of mma tiles, kept as one (warps, 16*rows, 8*columns) matrix in a local variable.

    ``pieces`` are the fragment pairs (A, B transposed) whose product is still to be added.
    """

    def __init__(self, start: str | None, grid: list[list[tuple[int, ...]]]) -> None:
        self.start, self.grid, self.pieces, self.name = start, grid, [], None

    def compute(self, e: Emitter) -> str:
        if self.name is None:
            self.name = e.temp("acc")
            a, b = (", ".join(p[i] for p in self.pieces) for i in (0, 1))
            e.line(f"{self.name} = mma_product([{a}], [{b}], {self.start})")
        return self.name

    def unpack(self, e: Emitter, number: int) -> None:
        """Emit the code that writes register ``number``."""
        for row, tiles in enumerate(self.grid):
            for column, tile in enumerate(tiles):
                if number in tile:
                    name = self.compute(e)
                    e.line(f"v{number} = accumulator_lane({name}, {row}, {column}, {tile.index(number)})")
                    return


@emits("mma", collective=32, group=True)
def multiply(e: Emitter, run: list[Instruction]) -> None:
    """A run of mma.sync.aligned.m16n8k{8,16}.row.col.f32.{bf16,f16}.{bf16,f16}.f32."""
    batch: list[Instruction] = []
    kind = None
    written: set[int] = set()
    for ins in [*run, None]:
        if ins is not None:
            e.ins = ins
            this = _kind(e, ins)
            reads = {r.number for operand in ins.operands[1:] for r in operand.items if isinstance(r, Register)}
        if batch and (ins is None or this != kind or reads & written):
            _batch(e, batch, *kind)
            batch, written = [], set()
        if ins is not None:
            kind = this
            batch.append(ins)
            written |= {r.number for r in ins.operands[0].items}


def _kind(e: Emitter, ins: Instruction) -> tuple[int, str]:
    mods = Modifiers(ins, ins.modifiers)
    mods.type("f32")
    source = mods.type("bf16", "f16")
    if mods.type("bf16", "f16") != source:
        raise e.fail("mma of mixed input types is not emulated")
    mods.type("f32")
    shape = next((m for m in mods.left if _SHAPE.match(m)), None)
    if shape is None or ins.guard:
        raise e.fail("mma is emulated unguarded, for m16n8k8 and m16n8k16")
    for name in ("sync", "aligned", shape, "row", "col"):
        mods.one(name)
    mods.done()
    return int(shape[6:]), source


def _batch(e: Emitter, batch: list[Instruction], depth: int, source: str) -> None:
    """Independent mma instructions: as one grid when they cover all pairs of fragments, else one by one."""
    rows: dict = {}
    columns: dict = {}
    tiles = {}
    for ins in batch:
        _, a, b, _ = ins.operands
        key = (rows.setdefault(a.items, len(rows)), columns.setdefault(b.items, len(columns)))
        if key in tiles:
            break
        tiles[key] = ins
    if len(tiles) == len(batch) == len(rows) * len(columns):
        _grid(e, list(rows), list(columns), tiles, depth, source)
    else:
        for ins in batch:
            _grid(e, [ins.operands[1].items], [ins.operands[2].items], {(0, 0): ins}, depth, source)


def _grid(e: Emitter, rows: list, columns: list, tiles: dict, depth: int, source: str) -> None:
    e.ins = tiles[0, 0]
    a = _fragments(e, "mma_rows", rows, depth, source, 2)
    b = _fragments(e, "mma_columns", columns, depth, source, 1)
    inputs = [[tiles[i, j].operands[3].items for j in range(len(columns))] for i in range(len(rows))]
    outputs = [
        [tuple(r.number for r in tiles[i, j].operands[0].items) for j in range(len(columns))] for i in range(len(rows))
    ]
    accumulator = _start(e, inputs, outputs)
    accumulator.pieces.append((a, b))
    for tile in tiles.values():
        for register in tile.operands[0].items:
            if not isinstance(register, Register) or len(tile.operands[0].items) != 4:
                raise PtxError(tile.line, tile.text, "mma needs four accumulator registers")
            e.written(register)
            e.deferred[register.number] = accumulator


def _fragments(e: Emitter, name: str, fragments: list, depth: int, source: str, halves: int) -> str:
    words = halves * depth // 8
    for items in fragments:
        if len(items) != words:
            raise e.fail(f"expected {words} fragment registers, found {len(items)}")
    flat = [r for items in fragments for r in items]
    values = [e.value(r, "u32") for r in flat]
    return e.common(f"{name} {source}", tuple(flat), f"{name}([{', '.join(values)}], {len(fragments)}, {source!r}, n)")


def _start(e: Emitter, inputs: list, outputs: list) -> Accumulator:
    """The accumulator that goes on: a deferred one with the same registers in the same places, or a fresh one."""
    flat = [r for row in inputs for tile in row for r in tile]
    same = [[tuple(r.number if isinstance(r, Register) else None for r in tile) for tile in row] for row in inputs]
    first = e.deferred.get(flat[0].number) if isinstance(flat[0], Register) else None
    if (
        isinstance(first, Accumulator)
        and first.grid == same
        and all(isinstance(r, Register) and e.deferred.get(r.number) is first for r in flat)
    ):
        going_on = Accumulator(first.start, outputs)
        going_on.pieces = list(first.pieces)  # not computed yet: an unpacked register is deferred no more
        return going_on
    if all(isinstance(r, Immediate) and r.value == 0 for r in flat):
        return Accumulator(None, outputs)
    values = [e.value(r, "u32") for r in flat]
    name = e.temp("c")
    e.line(f"{name} = accumulator_start([{', '.join(values)}], {len(inputs)}, {len(inputs[0])}, n)")
    return Accumulator(name, outputs)


def _decode_into(out: np.ndarray, word: np.ndarray, source: str) -> None:
    """Write the two 16-bit values of ``word`` to ``out[..., 0:2]`` (f32)."""
    if source == "bf16":
        bits = out.view(np.uint32)
        np.left_shift(word, np.uint32(16), out=bits[..., 0])
        np.bitwise_and(word, np.uint32(0xFFFF0000), out=bits[..., 1])
    else:
        out[...] = np.ascontiguousarray(word).view(np.float16).reshape(out.shape)


def _warp_words(word: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(word, n).reshape(-1, 8, 4)


@runtime
def mma_rows(words, fragments, source, n):
    """A fragments to (warps, 16*fragments, k): a0 (g, k0), a1 (g+8, k0), a2 (g, k0+8), a3 (g+8, k0+8)."""
    depth = len(words) // fragments // 2
    out = np.empty((n // 32, fragments, 2, 8, depth, 4, 2), np.float32)
    for i, word in enumerate(words):
        fragment, register = divmod(i, 2 * depth)
        _decode_into(out[:, fragment, register & 1, :, register >> 1], _warp_words(word, n), source)
    return out.reshape(n // 32, 16 * fragments, 8 * depth)


@runtime
def mma_columns(words, fragments, source, n):
    """B fragments to (warps, 8*fragments, k), transposed: b0 (k0, g), b1 (k0+8, g)."""
    depth = len(words) // fragments
    out = np.empty((n // 32, fragments, 8, depth, 4, 2), np.float32)
    for i, word in enumerate(words):
        fragment, register = divmod(i, depth)
        _decode_into(out[:, fragment, :, register], _warp_words(word, n), source)
    return out.reshape(n // 32, 8 * fragments, 8 * depth)


@runtime
def mma_product(rows, columns, start):
    """Sum of the products of a chain over k, plus the accumulators it began with."""
    a = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=2)
    b = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=2)
    out = np.matmul(a, b.transpose(0, 2, 1))
    if start is not None:
        out += start
    return out


@runtime
def accumulator_start(words, rows, columns, n):
    """Accumulator registers to one matrix a warp: c0, c1 (g, 2t and 2t+1), c2, c3 (g+8)."""
    out = np.empty((n // 32, rows, 2, 8, columns, 4, 2), np.uint32)
    for i, word in enumerate(words):
        tile, register = divmod(i, 4)
        row, column = divmod(tile, columns)
        out[:, row, register >> 1, :, column, :, register & 1] = _warp_words(word, n)
    return out.view(np.float32).reshape(n // 32, 16 * rows, 8 * columns)


@runtime
def accumulator_lane(matrix, row, column, register):
    """One accumulator register of all threads."""
    view = matrix[:, 16 * row + 8 * (register >> 1) :, 8 * column + (register & 1) :]
    return np.ascontiguousarray(view[:, :8, :8:2]).view(np.uint32).reshape(-1)
