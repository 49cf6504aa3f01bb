"""One kernel compiled to Python: a function per basic block, for all threads or for a subset of them."""

from __future__ import annotations

import numpy as np

from . import numerics
from .blocks import Block, build, definitions_and_uses, operation
from .emitter import DTYPES, Emitter, Modifiers, storage
from .errors import PtxError, operands_of
from .ptx.records import Instruction, KernelText
from .registry import RUNTIME, find
from .tensor_waits import early_reads


class Layout:
    """Where shared, local and parameter variables lie; offsets in bytes from their space's base."""

    def __init__(self, kernel: KernelText) -> None:
        self.places: dict[str, tuple[str, int]] = {}
        self.static_shared = self._static(kernel)
        self.local_bytes = 0
        for var in kernel.local:
            start = -(-self.local_bytes // var.align) * var.align
            self.places[var.name] = ("local", start)
            self.local_bytes = start + var.size
        for var in kernel.variables:
            self.places[var.name] = ("global", 0)
        for param in kernel.params:
            self.places.setdefault(param.name, ("param", param.offset))

    def _static(self, kernel: KernelText) -> int:
        used = _used_names(kernel)
        end = 0
        for var in kernel.shared:
            if not var.external and var.name in used:
                start = -(-end // var.align) * var.align
                self.places[var.name] = ("shared", start)
                end = start + var.size
        dynamic_align = max([v.align for v in kernel.shared if v.external and v.name in used], default=1)
        dynamic = -(-end // dynamic_align) * dynamic_align if end else 0
        for var in kernel.shared:
            if var.external:
                self.places[var.name] = ("shared", dynamic)
        return dynamic

    def place(self, name: str) -> tuple[str, int]:
        return self.places[name]


def _used_names(kernel: KernelText) -> set[str]:
    text = " ".join(ins.text for ins in kernel.instructions)
    return {v.name for v in kernel.shared if v.name.split("@")[0] in text}


class Program:
    """Blocks with compiled functions, register storage types, and the layout of variables."""

    def __init__(self, kernel: KernelText) -> None:
        self.kernel = kernel
        self.layout = Layout(kernel)
        self.blocks = build(kernel)
        self.constants: dict = {}
        self.types = [DTYPES[storage(r.type)] for r in kernel.registers]
        self.texts = {ins.line: ins.text for ins in kernel.instructions}
        self.maybe_unset = set(self.blocks[0].live_in)
        self.source = "\n".join(line for block in self.blocks for line in self._block(block))
        self._compile()

    def _block(self, block: Block) -> list[str]:
        e = Emitter(self.kernel, self.layout, block.live_out, self.constants)
        run: list[Instruction] = []
        uses = early_reads(self.kernel).uses
        for ins in [*block.instructions, None]:
            if ins and ins.line in uses:
                e.line(f"tmem_used(M, sel, {uses[ins.line]!r})")
            op = operation(ins) if ins else None
            if run and (op is None or not op.group or operation(run[0]).emit is not op.emit):
                with operands_of(run[0]):
                    operation(run[0]).emit(e, run)
                run = []
            if op is not None and op.group:
                run.append(ins)
            elif ins is not None:
                with operands_of(ins):
                    e.instruction(ins)
        value = self._terminator(e, block)
        for number in sorted(set(e.deferred) & block.live_out):
            e.materialise(number)
        late = definitions_and_uses(block.terminator)[0] if block.terminator else []  # written when the thread goes on
        kept = [n for n in block.defined if n in block.live_out and n not in late]
        return [*self._function(e, block, kept, value, False), *self._function(e, block, kept, value, True)]

    def _terminator(self, e: Emitter, block: Block) -> str:
        ins = block.terminator
        if ins is None:
            return "None"
        e.ins, e.pending = ins, []
        name, op = find(ins.opcode, ins.modifiers)
        mods = Modifiers(ins, ins.modifiers[name.count(".") :])
        with operands_of(ins):
            value = op.emit(e, ins, mods)
        mods.done()
        return value

    def _function(self, e: Emitter, block: Block, kept: list[int], value: str, masked: bool) -> list[str]:
        out = [f"def b{block.number}_{'masked' if masked else 'full'}(M, sel, n):", " R = M.R"]
        if block.touches:
            out.append(f" M.tiles.touch({block.number}, sel, n)")
        for n in block.loads:
            out.append(f" v{n} = read_lanes(R[{n}], sel)" if masked else f" v{n} = R[{n}]")
        out += [" " + line for line in e.body]
        out.append(f" result = {value}")
        for n in kept:
            out.append(f" write_lanes(M, {n}, sel, v{n})" if masked else f" R[{n}] = v{n}")
        return [*out, " return result", ""]

    def _compile(self) -> None:
        space = {"np": np, **DTYPES, **RUNTIME, **vars(numerics)}
        space.update(self.constants.values())
        exec(compile(self.source, f"<ptx {self.kernel.name}>", "exec"), space)
        for block in self.blocks:
            block.full, block.masked = space[f"b{block.number}_full"], space[f"b{block.number}_masked"]

    def instruction_at(self, line: int) -> str:
        return self.texts.get(line, "")


__all__ = ["Layout", "Program", "PtxError"]
