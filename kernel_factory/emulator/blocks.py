"""Basic blocks and liveness of one kernel.

A block ends at a label, a branch, or an opcode that can make threads wait. The first collective instruction
(ldmatrix, mma, shfl…) after a divergence point also starts a block, because whole warps must meet there.

Registers of wgmma fragments (*tile registers*) are read and written by the machine while the product is in flight.
A block either holds wgmma instructions or touches tile registers, never both, so that the machine can bring the
registers up to date before a block that touches them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import PtxError
from .ptx.records import Address, Instruction, KernelText, Register, Vector
from .registry import Op, find


@dataclass(kw_only=True)
class Block:
    number: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    terminator: Instruction | None = None
    terminator_op: Op | None = None
    target: int = -1
    collective: int = 0
    partial: bool = True
    defined: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    live_out: set[int] = field(default_factory=set)
    live_in: set[int] = field(default_factory=set)
    loads: list[int] = field(default_factory=list)
    wgmma: bool = False
    touches: list[tuple[Instruction, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    full: object = None
    masked: object = None
    repeats: bool | None = None

    @property
    def lines(self) -> list[Instruction]:
        return self.instructions + ([self.terminator] if self.terminator else [])

    @property
    def size(self) -> int:
        return len(self.instructions) + (self.terminator is not None)


def operation(ins: Instruction) -> Op:
    """The table's entry of an instruction; PtxError for an opcode that nobody registered."""
    _, op = find(ins.opcode, ins.modifiers)
    if op is None:
        raise PtxError(
            ins.line, ins.text, f"opcode {ins.opcode} is not emulated; add an emitter under emulator/ops with a test"
        )
    return op


def registers_of(operand: object) -> list[int]:
    if isinstance(operand, Register):
        return [operand.number]
    if isinstance(operand, Vector):
        return [n for item in operand.items for n in registers_of(item)]
    if isinstance(operand, Address):
        return registers_of(operand.base) + [n for item in operand.coordinates for n in registers_of(item)]
    return []


def tile_registers(ins: Instruction) -> list[int]:
    """Registers that the machine handles itself: the vector operands of an instruction marked ``tiles``."""
    if not operation(ins).tiles:
        return []
    return [n for operand in ins.operands if isinstance(operand, Vector) for n in registers_of(operand)]


def definitions_and_uses(ins: Instruction) -> tuple[list[int], list[int]]:
    """Registers written and registers read; a guarded write also reads, since the old value may stay."""
    writes = operation(ins).writes
    defined = registers_of(ins.operands[0]) if writes and ins.operands else []
    used = [n for operand in ins.operands[1 if writes else 0 :] for n in registers_of(operand)]
    if ins.guard:
        used += [ins.guard.number, *defined]
    return defined, used


def build(kernel: KernelText) -> list[Block]:
    """Split the statement list into blocks, with branch targets and liveness filled in."""
    starts: dict[int, list[str]] = {}
    for name, index in kernel.labels.items():
        starts.setdefault(index, []).append(name)
    blocks, at, current = [], {}, Block()
    tiles = {n for ins in kernel.instructions for n in tile_registers(ins)}

    def close(terminator: Instruction | None = None, op: Op | None = None) -> None:
        nonlocal current
        current.terminator, current.terminator_op, current.number = terminator, op, len(blocks)
        blocks.append(current)
        current = Block()

    for index, ins in enumerate([*kernel.instructions, None]):
        if index in starts:
            if current.instructions:
                close()
            at.update(dict.fromkeys(starts[index], len(blocks)))
        if ins is None:
            break
        op = operation(ins)
        touch = _touch(ins, tiles) if tiles else None
        if (touch and current.wgmma) or (ins.opcode == "wgmma" and current.touches):
            close()
        if op.collective > current.collective:
            if current.instructions:
                close()
            current.collective = op.collective
        if op.collective:
            current.partial &= op.partial
        current.wgmma |= ins.opcode == "wgmma"
        if touch:
            current.touches.append(touch)
        if op.resolve:
            close(ins, op)
        else:
            current.instructions.append(ins)
    close()  # the end of the text is a return: an empty last block
    for block in blocks:
        if block.terminator is not None and block.terminator.opcode == "bra":
            block.target = at[block.terminator.operands[0].name]
        _summarise(block)
    _liveness(blocks)
    return blocks


def _touch(ins: Instruction, tiles: set[int]) -> tuple[Instruction, tuple[int, ...], tuple[int, ...]] | None:
    """Tile registers that an ordinary instruction reads and writes, or None."""
    if ins.opcode == "wgmma":
        return None
    defined, used = definitions_and_uses(ins)
    reads, writes = tuple(n for n in used if n in tiles), tuple(n for n in defined if n in tiles)
    return (ins, reads, writes) if reads or writes else None


def _summarise(block: Block) -> None:
    defined, used, loads = {}, {}, {}
    for ins in block.lines:
        d, u = definitions_and_uses(ins)
        own = set(tile_registers(ins))
        loads.update((n, None) for n in u if n not in defined and n not in own)
        used.update((n, None) for n in u if n not in defined)
        defined.update((n, None) for n in d)
    block.defined, block.used, block.loads = list(defined), list(used), list(loads)


def successors(block: Block, count: int) -> list[int]:
    last = block.terminator
    following = [block.number + 1] if block.number + 1 < count else []
    if last is None or last.opcode not in ("bra", "ret", "exit", "trap"):
        return following
    go_on = following if last.guard else []
    return [block.target, *go_on] if last.opcode == "bra" else go_on


def _liveness(blocks: list[Block]) -> None:
    for block in blocks:
        block.live_in = set(block.used)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = set().union(*(blocks[s].live_in for s in successors(block, len(blocks))))
            live = set(block.used) | (out - set(block.defined))
            if out != block.live_out or live != block.live_in:
                block.live_out, block.live_in, changed = out, live, True
