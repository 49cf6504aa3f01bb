"""Turns one instruction into a line of NumPy source; the emitters of ``ops`` work through this class.

Every register of a block is a local variable ``v<number>`` that holds an array over the threads at hand, or an
array of one element when all threads hold the same value (constants, parameters, loop counters): NumPy broadcasts
it, and scalar bookkeeping then costs next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

import numpy as np

from .errors import PtxError
from .ptx.records import Address, Immediate, Instruction, KernelText, Register, Special, Symbol, Vector
from .ptx.words import BYTES
from .registry import find

NUMPY = {
    "b8": "u8",
    "u8": "u8",
    "s8": "i8",
    "b16": "u16",
    "u16": "u16",
    "s16": "i16",
    "b32": "u32",
    "u32": "u32",
    "s32": "i32",
    "f32": "f32",
    "b64": "u64",
    "u64": "u64",
    "s64": "i64",
    "f64": "f64",
    "f16": "f16",
    "bf16": "u16",
    "bf16x2": "u32",
    "f16x2": "u32",
    "f32x2": "u64",
    "b128": "c16",
    "pred": "bool",
}
DTYPES = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "c16": np.complex128,
    "bool": np.bool_,
}
CLOCKS = ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi")
_ALIAS = re.compile(r"\(*v\d+(\.view\(\w+\)|\))*$")


def storage(ptx_type: str) -> str:
    """The dtype name that holds a register of this type (floats live in unsigned words of their size)."""
    if ptx_type == "pred":
        return "bool"
    size = max(BYTES[ptx_type], 2)
    return "c16" if size == 16 else f"u{8 * size}"


def size_of(dtype: str) -> int:
    return np.dtype(DTYPES[dtype]).itemsize


class Modifiers:
    """The modifiers of an instruction, taken one by one; what is left at the end is an error."""

    def __init__(self, ins: Instruction, items: tuple[str, ...]) -> None:
        self.ins, self.left = ins, list(items)

    def take(self, *names: str) -> str | None:
        """Remove and return the first of ``names`` that is present."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        return None

    def one(self, *names: str) -> str:
        found = self.take(*names)
        if found is None:
            raise PtxError(self.ins.line, self.ins.text, f"expected one of the modifiers {', '.join(names)}")
        return found

    def type(self, *allowed: str) -> str:
        """Remove and return the last modifier, which must be a PTX type (one of ``allowed``, if given)."""
        kind = self.left.pop() if self.left else ""
        if kind not in NUMPY or (allowed and kind not in allowed):
            raise PtxError(
                self.ins.line,
                self.ins.text,
                f"type .{kind} is not supported here "
                f"(expected {', '.join(allowed) or 'a PTX type'}); add it to the emitter with a test",
            )
        return kind

    def ignore(self, *prefixes: str) -> None:
        """Drop hints that change no value (caching, scopes)."""
        self.left = [
            m for m in self.left if not any(m == p or (p.endswith("::") and m.startswith(p)) for p in prefixes)
        ]

    def done(self) -> None:
        if self.left:
            raise PtxError(
                self.ins.line,
                self.ins.text,
                f"modifier .{self.left[0]} is not emulated; add it to the emitter of {self.ins.opcode} with a test",
            )


class Emitter:
    """Source of one basic block, with the constants and common subexpressions that it shares."""

    def __init__(self, kernel: KernelText, layout: object, live_out: set[int], constants: dict) -> None:
        self.kernel, self.layout, self.live_out, self.constants = kernel, layout, live_out, constants
        self.body: list[str] = []
        self.versions: dict[int, int] = {}
        self.shared_values: dict[tuple, str] = {}
        self.deferred: dict[int, object] = {}
        self.temporaries = 0
        self.pending: list[tuple[Register, str]] = []
        self.ins: Instruction | None = None

    # -- what emitters call -------------------------------------------------------------------------------------
    def line(self, code: str) -> None:
        self.body.append(code)

    def temp(self, prefix: str = "t") -> str:
        self.temporaries += 1
        return f"{prefix}{self.temporaries}"

    def fail(self, message: str) -> PtxError:
        return PtxError(self.ins.line, self.ins.text, message)

    def operands(self, count: int) -> tuple:
        if len(self.ins.operands) != count:
            raise self.fail(f"expected {count} operands, found {len(self.ins.operands)}")
        return self.ins.operands

    def guard(self) -> str:
        """The guard predicate as an expression, or ``None``."""
        return self.value(self.ins.guard, "bool") if self.ins.guard else "None"

    def issue(self) -> str:
        """The first argument of a runtime function: this instruction, and the threads that execute it."""
        return f"Issue(M, sel, n, {self.guard()}, {self.ins.line})"

    def value(self, operand: object, dtype: str) -> str:
        """Expression for an operand read as ``dtype``."""
        if isinstance(operand, Register):
            return self._register(operand, dtype)
        if isinstance(operand, Immediate):
            return self._immediate(operand, dtype)
        if isinstance(operand, Special):
            if operand.name in CLOCKS:
                return f"clock(M, {operand.name!r}, {dtype})"
            return f"special(M, sel, {operand.name!r}, {dtype})"
        if isinstance(operand, Symbol):
            return self._symbol(operand, dtype)
        raise self.fail(f"operand {operand} cannot be read as {dtype}")

    def values(self, operand: object, dtype: str) -> list[str]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.value(x, dtype) for x in items]

    def set(self, operand: object, expression: str, dtype: str) -> None:
        """Schedule ``register = expression``; all of an instruction's results land together."""
        if operand is None:
            return
        if not isinstance(operand, Register) or operand.negated:
            raise self.fail(f"destination {operand} is no register")
        want = storage(operand.type)
        if want != dtype:
            if "bool" in (want, dtype):
                raise self.fail(f"a {dtype} result cannot go to a register of type .{operand.type}")
            if size_of(want) == size_of(dtype):
                expression = f"({expression}).view({want})"
            elif size_of(want) < size_of(dtype):
                raise self.fail(f"a {dtype} result does not fit a register of type .{operand.type}")
            elif dtype[0] == "i":
                expression = f"({expression}).astype(i{want[1:]}).view({want})"
            else:
                bits = f"u{8 * size_of(dtype)}"
                expression = f"({expression}).view({bits}).astype({want})"
        self.pending.append((operand, expression))

    def constant(self, value: np.generic) -> str:
        key = (value.dtype.char, value.tobytes())
        if key not in self.constants:
            self.constants[key] = (f"K{len(self.constants)}", np.array([value]))
        return self.constants[key][0]

    def static(self, value: Hashable) -> str:
        """The name of a record that is known when the kernel is compiled."""
        key = ("static", value)
        if key not in self.constants:
            self.constants[key] = (f"F{len(self.constants)}", value)
        return self.constants[key][0]

    def common(self, kind: str, registers: tuple, code: str) -> str:
        """A local that holds ``code`` and is reused until one of ``registers`` changes."""
        key = (kind, *((r.number, self.versions.get(r.number, 0)) for r in registers if isinstance(r, Register)))
        if key not in self.shared_values:
            name = self.temp("s")
            self.line(f"{name} = {code}")
            self.shared_values[key] = name
        return self.shared_values[key]

    def address(self, operand: object) -> tuple[object, int]:
        if not isinstance(operand, Address):
            raise self.fail(f"operand {operand} is no address in brackets")
        if isinstance(operand.base, Symbol):
            return Symbol(operand.base.name), operand.base.offset + operand.offset
        return operand.base, operand.offset

    def shared_place(self, operand: object) -> str:
        """A *place*, base and byte offset: the base is a local that is shared by all uses of the base register."""
        base, offset = self.address(operand)
        dtype = "u64" if isinstance(base, Register) and storage(base.type) == "u64" else "u32"
        return self._place("shared", base, offset, f"shared_base(M, sel, {self.value(base, dtype)})")

    def global_place(self, operand: object) -> str:
        """The same in global memory."""
        base, offset = self.address(operand)
        return self._place("global", base, offset, f"global_base({self.value(base, 'u64')})")

    def cluster_place(self, operand: object) -> str:
        """The same for a shared::cluster (or generic shared) address."""
        base, offset = self.address(operand)
        dtype = "u64" if getattr(base, "type", "").endswith("64") else "u32"
        return self._place("cluster", base, offset, f"cluster_base(M, sel, {self.value(base, dtype)})")

    def _place(self, space: str, base: object, offset: int, code: str) -> str:
        known = isinstance(base, Register)
        return f"({self.common(space if known else f'{space} {base}', (base,) if known else (), code)}, {offset})"

    # -- one instruction, one block -----------------------------------------------------------------------------
    def instruction(self, ins: Instruction) -> None:
        self.ins, self.pending = ins, []
        name, op = find(ins.opcode, ins.modifiers)
        if op is None:
            raise self.fail(
                f"opcode {ins.opcode} is not emulated; add an emitter for it under emulator/ops with a test"
            )
        mods = Modifiers(ins, ins.modifiers[name.count(".") :])
        op.emit(self, ins, mods)
        mods.done()
        self._commit()

    def _commit(self) -> None:
        targets, sources = [], []
        for register, expression in self.pending:
            if _ALIAS.match(expression) and register.number in self.live_out:
                expression += ".copy()"  # two registers must not share memory: masked writes are in place
            if self.ins.guard:
                expression = (
                    f"np.where({self.guard()}, {expression}, {self._register(register, storage(register.type))})"
                )
            targets.append(f"v{register.number}")
            sources.append(expression)
        if targets:
            self.line(f"{', '.join(targets)} = {', '.join(sources)}")
        for register, _ in self.pending:
            self.written(register)

    def written(self, register: Register) -> None:
        self.versions[register.number] = self.versions.get(register.number, 0) + 1
        self.deferred.pop(register.number, None)

    def materialise(self, number: int) -> None:
        """Write a register whose value still sits in a matrix of a deferred matrix product."""
        source = self.deferred.pop(number, None)
        if source is not None:
            source.unpack(self, number)

    # -- operand kinds ------------------------------------------------------------------------------------------
    def _register(self, register: Register, dtype: str) -> str:
        self.materialise(register.number)
        name, have = f"v{register.number}", storage(register.type)
        if dtype == have:
            return f"(~{name})" if register.negated else name
        if "bool" in (dtype, have):
            raise self.fail(f"register {register.name} of type .{register.type} cannot be read as {dtype}")
        if size_of(dtype) == size_of(have):
            return f"{name}.view({dtype})"
        if size_of(dtype) > size_of(have):
            raise self.fail(
                f"register {register.name} of type .{register.type} is narrower than the {dtype} read from it"
            )
        bits = f"u{8 * size_of(dtype)}"
        return f"{name}.astype({bits})" + (f".view({dtype})" if dtype != bits else "")

    def _immediate(self, operand: Immediate, dtype: str) -> str:
        if dtype == "bool":
            return self.constant(np.bool_(operand.value != 0))
        size = size_of(dtype)
        if operand.kind == "decimal":
            return self._decimal(operand.value, dtype)
        wrong = dtype in ("f32", "f64") if operand.kind == "int" else size != {"f32": 4, "f64": 8}[operand.kind]
        if wrong:
            raise self.fail(f"constant of kind {operand.kind} cannot be read as {dtype}")
        if dtype == "c16":
            raise self.fail("constants of 128 bits are not supported")
        value = np.array(operand.value & ((1 << 8 * size) - 1), f"u{size}").view(DTYPES[dtype])
        return self.constant(value[()])

    def _decimal(self, value: float, dtype: str) -> str:
        if dtype not in ("f32", "f64"):
            raise self.fail(f"constant {value} cannot be read as {dtype}")
        return self.constant(DTYPES[dtype](value))

    def _symbol(self, operand: Symbol, dtype: str) -> str:
        space, offset = self.layout.place(operand.name)
        if dtype not in ("u32", "u64"):
            raise self.fail(f"the address of {operand.name} cannot be read as {dtype}")
        if space == "global":
            return f"variable_address(M, {operand.name!r}, {operand.offset}, {dtype})"
        return f"symbol_address(M, sel, {space!r}, {offset + operand.offset}, {dtype})"
