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

from functools import lru_cache

import numpy as np

from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import spread, threads_of
from ..ptx.records import Address, Immediate, Instruction, Vector
from ..registry import emits, runtime
from ..tensor_core import Store
from ..tensor_waits import early_reads
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


def _form(e: Emitter, ins: Instruction, mods: Modifiers, pack: str) -> tuple[str, int, bool]:
    collective(e, ins, mods)
    mods.type("b32")
    shape = mods.one(*_PER_REGISTER)
    number = mods.one(*(f"x{1 << i}" for i in range(8)))
    count = int(number[1:])
    if count > _MOST.get(shape, 128):
        raise e.fail(f"shape .{shape} goes up to .x{_MOST[shape]}")
    return shape, count, bool(mods.take(pack))


def _operands(e: Emitter, shape: str, count: int, address: object, registers: object, rest: tuple):
    """Address expression, registers, and the offset of the second half."""
    items = registers.items if isinstance(registers, Vector) else (registers,)
    if len(items) != count * _PER_REGISTER[shape]:
        raise e.fail(f"{len(items)} registers, .{shape}.x{count} has {count * _PER_REGISTER[shape]}")
    if not isinstance(address, Address):
        raise e.fail("the TMEM address must stand in brackets")
    split = 0
    if shape == "16x32bx2":
        if len(rest) != 1 or not isinstance(rest[0], Immediate):
            raise e.fail(".16x32bx2 takes the column offset of its second half as a constant")
        split = rest[0].value
    elif rest:
        raise e.fail(f"too many operands for .{shape}")
    return tmem_address(e, address), items, split


def tmem_address(e: Emitter, address: Address) -> str:
    """Expression of a TMEM address in brackets."""
    base, offset = e.address(address)
    value = e.value(base, "u32")
    return f"({value} + u32({offset & 0xFFFFFFFF}))" if offset else value


@emits("tcgen05.ld", collective=32)
def load(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.ld.sync.aligned.shape.xN{.pack::16b}.b32 r, [taddr]{, offset of the second half}."""
    if "red" in mods.left:
        raise e.fail("tcgen05.ld.red is not emulated; add it to ops/tcgen05_ldst.py with a test")
    shape, count, packed = _form(e, ins, mods, "pack::16b")
    registers, address, *rest = ins.operands
    where, items, split = _operands(e, shape, count, address, registers, tuple(rest))
    early = early_reads(e.kernel)
    poisoned = early.registers.get(ins.line, frozenset())
    name = e.temp()
    e.line(f"{name} = tmem_load(M, sel, {where}, {shape!r}, {count}, {packed}, {split}, {ins.line}, n)")
    if poisoned:
        e.line(f"tmem_early(M, sel, {ins.line}, {sorted(early.reads.items())!r})")
    for i, item in enumerate(items):
        if item is not None:
            e.set(item, f"tmem_register(M, {name}[{i}])" if item.number in poisoned else f"{name}[{i}]", "u32")


@runtime
def tmem_early(M, sel, line, reads):
    if M.race and M.tensor.strict:
        for reading, loading in reads:
            if loading == line:
                M.report(
                    "tcgen05-ld-not-waited",
                    reading,
                    f"a register of the tcgen05.ld at line {line} is read before tcgen05.wait::ld",
                    "put tcgen05.wait::ld.sync.aligned between the load and the first use of its registers",
                    int(threads_of(M, sel, None)[0]),
                    line,
                )


@runtime
def tmem_used(M, sel, loads):
    if M.tensor.races and not M.tensor.strict:
        M.tensor.races.used(threads_of(M, sel, None), loads)


@runtime
def tmem_register(M, loaded):
    return np.full_like(loaded, 0xFFFFFFFF) if M.tensor.strict else loaded


def _places(M, sel, address, shape, count, packed, split, line, n):
    """Checked (CTA, warp slot, first lane, first column, relative lanes, relative columns) of an access."""
    threads = threads_of(M, sel, None)
    where = warp_value(address, n, line, "TMEM address", threads)
    first = threads[::32]
    cta, warp = M.cta[first], M.warp[first]
    lane, column = (where >> np.uint32(16)).astype(np.int64), (where & np.uint32(0xFFFF)).astype(np.int64)
    quarter = 32 * (warp % 4)
    wrong = lane != quarter
    if shape != "32x32b":
        wrong &= lane != quarter + 16
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise Fault(
            "tmem-lane-quarter", line,
            f"warp {int(warp[at])} accesses TMEM lane {int(lane[at])} with shape .{shape}; "
            f"it reaches lanes {int(quarter[at])} to {int(quarter[at]) + 31}",
            "add 32 * (warp % 4) lanes (bit 21 on) to the address; 16-lane shapes start at the quarter or 16 above",
            int(first[at]),
        )  # fmt: skip
    rows, columns = cells(shape, count, packed, split)
    width = int(columns.max()) + 1 + packed
    low = int(columns.min())
    for start in np.unique(column):
        some = column == start
        M.tensor.memory.check(cta[some], 0, 1, int(start) + low, width - low, line, int(first[np.argmax(some)]))
    return first, cta, warp, lane, column, rows, columns


@runtime
def tmem_load(M, sel, address, shape, count, packed, split, line, n):
    first, cta, warp, lane, column, rows, columns = _places(M, sel, address, shape, count, packed, split, line, n)
    data = M.tensor.memory.data
    ctas, lanes, where = cta[:, None], lane[:, None] + rows[:, None, :], column[:, None] + columns[:, None, :]
    x = data[ctas, lanes, where]
    if packed:
        x = (x & np.uint32(0xFFFF)) | (data[ctas, lanes, where + 1] << np.uint32(16))
    if M.tensor.races:
        M.tensor.races.load(first, cta, warp, lane, column, rows, columns, packed, line)
    if M.count:
        M.count.tensor_memory("ld", x.size * 4)
    return x.reshape(x.shape[0], -1)


@emits("tcgen05.st", writes=False, collective=32)
def store(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.st.sync.aligned.shape.xN{.unpack::16b}.b32 [taddr]{, offset of the second half}, r."""
    shape, count, packed = _form(e, ins, mods, "unpack::16b")
    address, *rest, registers = ins.operands
    where, items, split = _operands(e, shape, count, address, registers, tuple(rest))
    values = [e.value(x, "u32") for x in items]
    e.line(f"tmem_store(M, sel, {where}, {shape!r}, {count}, {packed}, {split}, [{', '.join(values)}], {ins.line}, n)")


@runtime
def tmem_store(M, sel, address, shape, count, packed, split, values, line, n):
    first, cta, warp, lane, column, rows, columns = _places(M, sel, address, shape, count, packed, split, line, n)
    words = np.stack([spread(v, n).reshape(-1, 32) for v in values], axis=1)  # (warps, registers, lanes)
    core = M.tensor
    for i in range(first.shape[0]):
        lanes, where, data = lane[i] + rows, column[i] + columns, words[i]
        if packed:
            lanes, where = np.concatenate([lanes, lanes]), np.concatenate([where, where + 1])
            data = np.concatenate([data & np.uint32(0xFFFF), data >> np.uint32(16)])
        core.stores.append(Store((int(cta[i]), int(warp[i])), lanes, where, data))
    if core.races:
        core.races.store(first, cta, warp, lane, column, rows, columns, packed, line)
    if M.count:
        M.count.tensor_memory("st", words.size * 4)


@emits("tcgen05.wait::ld", "tcgen05.wait::st", writes=False, collective=32)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.wait::{ld,st}.sync.aligned: the warp's loads or stores are complete."""
    collective(e, ins, mods)
    e.operands(0)
    e.line(f"tmem_wait(M, sel, {ins.modifiers[0][-2:]!r})")


@runtime
def tmem_wait(M, sel, kind):
    first = threads_of(M, sel, None)[::32]
    if kind == "st" and M.tensor.stores:
        M.tensor.land_stores(set(zip(M.cta[first].tolist(), M.warp[first].tolist(), strict=True)))
    if M.tensor.races:
        M.tensor.races.waited(first, kind)
