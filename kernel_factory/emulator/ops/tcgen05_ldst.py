"""tcgen05.ld, st and wait (PTX ISA 9.7.16.8): between TMEM and registers, a warp and its quarter of the lanes.

With l the lane of the warp and r the register, each shape takes the cell of (PTX ISA 9.7.16.2.3)

    32x32b    lane l                      column r
    16x64b    lane l//4 + 8 (l%2)         column l//2 % 2 + 2 r
    16x128b   lane l//4 + 8 (r%2)         column l%4 + 4 (r//2)
    16x256b   lane l//4 + 8 (r//2 % 2)    column r%2 + 2 (l%4) + 8 (r//4)
    16x32bx2  lane l%16                   column r, and from lane 16 on r + the half's offset

With .pack::16b and .unpack::16b a register stands for the low halves of two neighbouring columns. A load's registers
hold poison where a strict kernel can read them before tcgen05.wait::ld (tensor_waits); a store lands at wait::st.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..lanes import spread, threads_of
from ..ptx.records import Address, Immediate, Instruction, Vector
from ..registry import emits, runtime
from ..tensor_core import Store
from ..tensor_waits import early_reads
from ..tmem import Area
from .tcgen05_alloc import collective, warp_value

_PER_REGISTER = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_MOST = {"16x128b": 64, "16x256b": 32}


@lru_cache(maxsize=256)
def cells(shape: str, count: int, packed: bool, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column of (register, lane of the warp), relative to the address; packed columns come in pairs."""
    r, lane = np.arange(count * _PER_REGISTER[shape])[:, None], np.arange(32)[None, :]
    rows, columns = {
        "32x32b": (lane + 0 * r, r + 0 * lane),
        "16x64b": (lane // 4 + 8 * (lane % 2) + 0 * r, lane // 2 % 2 + 2 * r),
        "16x128b": (lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)),
        "16x256b": (lane // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r // 4)),
        "16x32bx2": (lane % 16 + 0 * r, r + 0 * lane),
    }[shape]
    if packed:
        columns = columns * 2
    if shape == "16x32bx2":
        columns = columns + split * (lane // 16)
    return rows, columns


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the opcode says: shape, repeats, packed halves, and the column offset of the second half of 16x32bx2."""

    shape: str
    count: int
    packed: bool
    split: int = 0

    @property
    def registers(self) -> int:
        return self.count * _PER_REGISTER[self.shape]


def _form(e: Emitter, ins: Instruction, mods: Modifiers, pack: str, rest: tuple) -> Form:
    collective(e, ins, mods)
    mods.type("b32")
    shape = mods.one(*_PER_REGISTER)
    count = int(mods.one(*(f"x{1 << i}" for i in range(8)))[1:])
    if count > _MOST.get(shape, 128):
        raise e.fail(f"shape .{shape} goes up to .x{_MOST[shape]}")
    form = Form(shape=shape, count=count, packed=bool(mods.take(pack)))
    if shape != "16x32bx2":
        if rest:
            raise e.fail(f"too many operands for .{shape}")
        return form
    if len(rest) != 1 or not isinstance(rest[0], Immediate):
        raise e.fail(".16x32bx2 takes the column offset of its second half as a constant")
    return replace(form, split=rest[0].value)


def _registers(e: Emitter, form: Form, registers: object) -> tuple:
    items = registers.items if isinstance(registers, Vector) else (registers,)
    if len(items) != form.registers:
        raise e.fail(f"{len(items)} registers, .{form.shape}.x{form.count} has {form.registers}")
    return items


def tmem_address(e: Emitter, address: object) -> str:
    """Expression of a TMEM address in brackets."""
    if not isinstance(address, Address):
        raise e.fail("the TMEM address must stand in brackets")
    base, offset = e.address(address)
    value = e.value(base, "u32")
    return f"({value} + u32({offset & 0xFFFFFFFF}))" if offset else value


@emits("tcgen05.ld", collective=32)
def load(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.ld.sync.aligned.shape.xN{.pack::16b}.b32 r, [taddr]{, offset of the second half}."""
    if "red" in mods.left:
        raise e.fail("tcgen05.ld.red is not emulated; add it to ops/tcgen05_ldst.py with a test")
    registers, address, *rest = ins.operands
    form = _form(e, ins, mods, "pack::16b", tuple(rest))
    items = _registers(e, form, registers)
    early = early_reads(e.kernel)
    poisoned = early.registers.get(ins.line, frozenset())
    name = e.temp()
    e.line(f"{name} = tmem_load({e.issue()}, {tmem_address(e, address)}, {e.static(form)})")
    if poisoned:
        e.line(f"tmem_early({e.issue()}, {sorted(early.reads.items())!r})")
    for i, item in enumerate(items):
        if item is not None:
            e.set(item, f"tmem_register(M, {name}[{i}])" if item.number in poisoned else f"{name}[{i}]", "u32")


@runtime
def tmem_early(issue: Issue, reads: list[tuple[int, int]]) -> None:
    M, line = issue.M, issue.line
    if M.race and M.tensor.strict:
        for reading, loading in reads:
            if loading == line:
                M.report(
                    "tcgen05-ld-not-waited",
                    reading,
                    f"a register of the tcgen05.ld at line {line} is read before tcgen05.wait::ld",
                    "put tcgen05.wait::ld.sync.aligned between the load and the first use of its registers",
                    int(issue.threads[0]),
                    line,
                )


@runtime
def tmem_used(M, sel, loads):
    if M.tensor.races and not M.tensor.strict:
        M.tensor.races.used(threads_of(M, sel), loads)


@runtime
def tmem_register(M, loaded):
    return np.full_like(loaded, 0xFFFFFFFF) if M.tensor.strict else loaded


@dataclass(frozen=True, slots=True)
class Reach:
    """What each warp of an access touches: its first thread, CTA and slot, and where its part of TMEM begins.

    ``rows`` and ``columns`` are the lanes and columns of (register, lane of the warp) from there on; with ``packed``
    each column stands for two.
    """

    first: np.ndarray
    cta: np.ndarray
    warp: np.ndarray
    lane: np.ndarray
    column: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    packed: bool


def _reach(issue: Issue, address: np.ndarray, form: Form) -> Reach:
    """The checked reach of an access."""
    M = issue.M
    where = warp_value(issue, address, "TMEM address")
    first = issue.threads[::32]
    cta, warp = M.cta[first], M.warp[first]
    lane, column = (where >> np.uint32(16)).astype(np.int64), (where & np.uint32(0xFFFF)).astype(np.int64)
    quarter = 32 * (warp % 4)
    wrong = lane != quarter
    if form.shape != "32x32b":
        wrong &= lane != quarter + 16
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise issue.fault(
            "tmem-lane-quarter",
            f"warp {int(warp[at])} accesses TMEM lane {int(lane[at])} with shape .{form.shape}; "
            f"it reaches lanes {int(quarter[at])} to {int(quarter[at]) + 31}",
            "add 32 * (warp % 4) lanes (bit 21 on) to the address; 16-lane shapes start at the quarter or 16 above",
            32 * at,
        )
    rows, columns = cells(form.shape, form.count, form.packed, form.split)
    low, width = int(columns.min()), int(columns.max()) + 1 + form.packed
    for start in np.unique(column):
        some = column == start
        area = Area(column=int(start) + low, columns=width - low)
        M.tensor.memory.check(cta[some], area, issue.line, int(first[np.argmax(some)]))
    return Reach(first, cta, warp, lane, column, rows, columns, form.packed)


@runtime
def tmem_load(issue: Issue, address: np.ndarray, form: Form) -> np.ndarray:
    M, to = issue.M, _reach(issue, address, form)
    data = M.tensor.memory.data
    lanes, where = to.lane[:, None] + to.rows[:, None, :], to.column[:, None] + to.columns[:, None, :]
    x = data[to.cta[:, None], lanes, where]  # (registers, warps, lanes)
    if to.packed:
        x = (x & np.uint32(0xFFFF)) | (data[to.cta[:, None], lanes, where + 1] << np.uint32(16))
    if M.tensor.races:
        M.tensor.races.load(to, issue.line)
    if M.count:
        M.count.tensor_memory("ld", x.size * 4)
    return x.reshape(x.shape[0], -1)


@emits("tcgen05.st", writes=False, collective=32)
def store(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.st.sync.aligned.shape.xN{.unpack::16b}.b32 [taddr]{, offset of the second half}, r."""
    address, *rest, registers = ins.operands
    form = _form(e, ins, mods, "unpack::16b", tuple(rest))
    values = [e.value(x, "u32") for x in _registers(e, form, registers)]
    e.line(f"tmem_store({e.issue()}, {tmem_address(e, address)}, {e.static(form)}, [{', '.join(values)}])")


@runtime
def tmem_store(issue: Issue, address: np.ndarray, form: Form, values: list[np.ndarray]) -> None:
    M, to = issue.M, _reach(issue, address, form)
    words = np.stack([spread(v, issue.n).reshape(-1, 32) for v in values], axis=1)  # (warps, registers, lanes)
    for i in range(to.first.shape[0]):
        lanes, where, data = to.lane[i] + to.rows, to.column[i] + to.columns, words[i]
        if to.packed:
            lanes, where = np.concatenate([lanes, lanes]), np.concatenate([where, where + 1])
            data = np.concatenate([data & np.uint32(0xFFFF), data >> np.uint32(16)])
        M.tensor.stores.append(Store((int(to.cta[i]), int(to.warp[i])), lanes, where, data))
    if M.tensor.races:
        M.tensor.races.store(to, issue.line)
    if M.count:
        M.count.tensor_memory("st", words.size * 4)


@emits("tcgen05.wait::ld", "tcgen05.wait::st", writes=False, collective=32)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.wait::{ld,st}.sync.aligned: the warp's loads or stores are complete."""
    collective(e, ins, mods)
    e.operands(0)
    e.line(f"tmem_wait({e.issue()}, {ins.modifiers[0][-2:]!r})")


@runtime
def tmem_wait(issue: Issue, kind: str) -> None:
    M, first = issue.M, issue.threads[::32]
    if kind == "st" and M.tensor.stores:
        M.tensor.land_stores(set(zip(M.cta[first].tolist(), M.warp[first].tolist(), strict=True)))
    if M.tensor.races:
        M.tensor.races.waited(first, kind)
