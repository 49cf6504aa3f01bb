"""Parser for kernel bodies of PTX (ISA 9.3), inline-assembly scopes, calls and indexed branches included.

Our own and not pyptx (Apache, alpha): an alpha dependency whose syntax tree adds nothing to the flat statement list
that the code generator wants. Anything not understood is a PtxError with its line; nothing is skipped but comments,
``.loc``, ``.file``, ``.pragma`` and debug sections, which do not change what a kernel computes.
"""

from __future__ import annotations

import re

from ..errors import PtxError
from . import calls
from .records import (
    Address,
    Function,
    Immediate,
    Instruction,
    KernelText,
    Label,
    Register,
    Special,
    Symbol,
    Vector,
)
from .variables import variable
from .words import BYTES, DECIMAL, DEEPEST, IDENT, INTEGER, float_bits, integer, split

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$|"
    r"%(laneid|warpid|nwarpid|smid|nsmid|gridid|lanemask_(eq|lt|le|gt|ge)|cluster_ctarank|"
    r"cluster_nctarank|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|"
    r"total_smem_size|aggr_smem_size|is_explicit_cluster)$|(WARP_SZ)$"
)
_LABEL = re.compile(rf"({IDENT})\s*:(?!:)")
_DEBUG = re.compile(r"\.(loc|file)\b")
_SPACE = re.compile(r"\s+")
_INSTRUCTION = re.compile(rf"(?:@(!?)\s*({IDENT})\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)$", re.S)

_WHOLE = ("shfl", "vote", "match", "redux", "elect", "mma", "ldmatrix", "stmatrix", "movmatrix", "barrier")
_CARRY = ("addc", "subc", "madc")


class _Scope:
    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[str, Register] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.labels: set[str] = set()
        self.variables: dict[str, str] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.vectors: dict[str, Vector] = {}


class BodyParser:
    """Walks one kernel body statement by statement, keeping the stack of scopes."""

    def __init__(
        self, text: str, pos: int, line: int, kernel: KernelText, functions: dict[str, Function] | None = None
    ) -> None:
        self.text, self.pos, self.kernel, self.functions = text, pos, kernel, functions or {}
        self.at, self.at_line = pos, line
        self.scopes = [_Scope(0)]
        self.opened = 0
        self.returns: list[str] = []
        self.functions_open: list[str] = []
        self.known = {p.name for p in kernel.params}
        self.known |= {v.name for v in (*kernel.shared, *kernel.local, *kernel.variables)}
        self.last_label: str | None = None

    def line(self) -> int:
        self.at_line += self.text.count("\n", self.at, self.pos)
        self.at = self.pos
        return self.at_line

    def parse(self) -> int:
        self.statements(0)
        for ins in self.kernel.instructions:
            for operand in ins.operands:
                if isinstance(operand, Label) and operand.name not in self.kernel.labels:
                    raise PtxError(
                        ins.line, ins.text, f"branch to label {operand.name}, which the kernel does not define"
                    )
        return self.pos

    def statements(self, depth: int) -> None:
        """Parse until only ``depth`` scopes are open."""
        text = self.text
        while True:
            space = _SPACE.match(text, self.pos)
            if space:
                self.pos = space.end()
            ch = text[self.pos : self.pos + 1]
            if not ch:
                raise PtxError(self.line(), "", "the kernel's body has no closing brace; the text is cut off")
            if ch == "{":
                self.open_scope()
            elif ch == "}":
                self.pos += 1
                self.scopes.pop()
                if len(self.scopes) == depth:
                    return
            elif ch == ";":
                self.pos += 1
            elif label := _LABEL.match(text, self.pos):
                self._place(label[1])
                self.pos = label.end()
                self.last_label = label[1]
            elif _DEBUG.match(text, self.pos):
                end = text.find("\n", self.pos)
                self.pos = end if end >= 0 else len(text)
            else:
                self._statement()
                self.last_label = None

    # -- scopes, labels, names ----------------------------------------------------------------------------------
    def open_scope(self) -> None:
        if len(self.scopes) > DEEPEST:
            raise PtxError(self.line(), "{", f"more than {DEEPEST} scopes inside each other")
        self.opened += 1
        scope = _Scope(self.opened)
        end = self._matching(self.pos)
        scope.labels = {m[1] for m in re.finditer(rf"(?:^|[;{{}}\n])\s*({IDENT})\s*:(?!:)", self.text[self.pos : end])}
        self.scopes.append(scope)
        self.pos += 1

    def _matching(self, start: int) -> int:
        depth = 0
        for brace in re.compile(r"[{}]").finditer(self.text, start):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return brace.start()
        raise PtxError(self.line(), "{", "this scope has no closing brace; the text is cut off")

    def fresh_label(self, stem: str) -> str:
        self.opened += 1
        return f"{stem}@{self.opened}"

    def _place(self, name: str) -> None:
        self.place_raw(self.label(name))

    def place_raw(self, label: str) -> None:
        if label in self.kernel.labels:
            raise PtxError(self.line(), label, f"label {label} is defined twice in one scope")
        self.kernel.labels[label] = len(self.kernel.instructions)

    def label(self, name: str) -> str:
        for scope in reversed(self.scopes[1:]):
            if name in scope.labels:
                return f"{name}@{scope.number}"
        return name

    def variable_name(self, name: str) -> str | None:
        """The unique name of a variable or parameter in reach, or None."""
        for scope in reversed(self.scopes):
            if name in scope.variables:
                return scope.variables[name]
        return name if name in self.known else None

    # -- statements ---------------------------------------------------------------------------------------------
    def add(self, opcode: str, modifiers: tuple, operands: tuple, guard: object, line: int, source: str) -> None:
        if len(self.kernel.instructions) > calls.MOST_INSTRUCTIONS:
            raise PtxError(line, source, f"more than {calls.MOST_INSTRUCTIONS} instructions in a kernel")
        self.kernel.instructions.append(Instruction(opcode, modifiers, operands, guard, line, source))

    def _statement(self) -> None:
        end = self.text.find(";", self.pos)
        if end < 0:
            raise PtxError(self.line(), self.text[self.pos : self.pos + 60], "statement without a closing semicolon")
        line = self.line()
        source = " ".join(self.text[self.pos : end].split())
        self.pos = end + 1
        if source.startswith("."):
            self._declare(source, line)
            return
        match = _INSTRUCTION.match(source)
        if not match:
            raise PtxError(line, source[:200], "statement not understood")
        guard = self._register(match[2], line, source, match[1] == "!") if match[2] else None
        opcode, modifiers = match[3], tuple(match[4].split(".")[1:])
        if opcode == "call":
            calls.call(self, guard, match[5], line, source)
        elif opcode == "brx":
            calls.indexed_branch(self, guard, match[5], line, source)
        elif guard and (opcode in _WHOLE or opcode == "bar"):
            calls.behind_branch(self, guard, opcode, modifiers, split(match[5]), line, source)
        elif opcode == "ret" and self.returns:
            self.add("bra", (), (Label(self.returns[-1]),), guard, line, source)
        else:
            self.add(
                opcode, modifiers, self.operands(opcode, modifiers, split(match[5]), line, source), guard, line, source
            )

    def operands(self, opcode: str, modifiers: tuple, parts: list[str], line: int, source: str) -> tuple:
        if opcode == "bra":
            if len(parts) != 1:
                raise PtxError(line, source, "bra takes one label")
            return (Label(self.label(parts[0])),)
        operands = tuple(self.operand(p, line, source) for p in parts)
        if opcode in _CARRY or (opcode in ("add", "sub", "mad") and "cc" in modifiers):
            return self._with_carry(opcode, modifiers, operands)
        return operands

    def _with_carry(self, opcode: str, modifiers: tuple, operands: tuple) -> tuple:
        """The carry flag as an operand: read by addc and its kin, written by the .cc forms (PTX ISA 9.7.2)."""
        flag = self.scopes[0].names.get("CC.CF") or self.new_register("CC.CF", "pred", self.scopes[0])
        if operands and "cc" in modifiers:
            operands = (Vector((operands[0], flag)), *operands[1:])
        return (*operands, flag) if opcode in _CARRY else operands

    def _declare(self, source: str, line: int) -> None:
        kind, _, rest = source.partition(" ")
        if kind == ".reg":
            self._registers(rest, line)
        elif kind in (".shared", ".local", ".param"):
            self._variable(kind[1:], rest, line)
        elif kind == ".branchtargets":
            calls.targets(self, self.last_label, rest, line)
        elif kind != ".pragma":
            raise PtxError(line, source[:200], f"directive {kind} is not supported; add it to the parser with a test")

    def _variable(self, space: str, text: str, line: int) -> None:
        """Variables of scopes get names of their own; a function's shared variables exist once."""
        var = variable(text, line, space=space)
        name = var.name
        if len(self.scopes) > 1 or space == "param":
            owner = self.functions_open[-1] if self.functions_open and space == "shared" else self.scopes[-1].number
            name = f"{var.name}@{owner}"
        self.scopes[-1].variables[var.name] = name
        if name in self.known:
            if space == "shared":
                return
            raise PtxError(line, text[:80], f"variable {var.name} is declared twice")
        self.known.add(name)
        where = self.kernel.shared if space == "shared" else self.kernel.local
        where.append(var.renamed(name))

    def _registers(self, rest: str, line: int) -> None:
        kind, _, names = rest.strip().lstrip(".").partition(" ")
        width = {"v2": 2, "v4": 4}.get(kind, 0)
        if width:  # a vector register: its elements are name.x, name.y, …
            kind, _, names = names.strip().lstrip(".").partition(" ")
        if kind not in BYTES:
            raise PtxError(line, rest[:80], f"register type .{kind} is not known")
        for name in split(names):
            ranged = re.match(rf"({IDENT})<\s*(\d{{1,9}})\s*>$", name)
            if ranged:
                self.scopes[-1].ranges.append((ranged[1], int(ranged[2]), kind))
            elif width and re.match(rf"{IDENT}$", name):
                items = tuple(self.new_register(f"{name}.{x}", kind, self.scopes[-1]) for x in "xyzw"[:width])
                self.scopes[-1].vectors[name] = Vector(items)
            elif re.match(rf"{IDENT}$", name):
                self.new_register(name, kind, self.scopes[-1])
            else:
                raise PtxError(line, rest[:80], f"register name {name[:40]!r} not understood")

    def new_register(self, name: str, kind: str, scope: _Scope) -> Register:
        register = Register(len(self.kernel.registers), kind, name)
        self.kernel.registers.append(register)
        scope.names[name] = register
        return register

    def _find(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
            for prefix, count, kind in scope.ranges:
                tail = name[len(prefix) :]
                if name.startswith(prefix) and tail.isdecimal() and len(tail) < 10 and int(tail) < count:
                    return self.new_register(name, kind, scope)
        return None

    def _register(self, name: str, line: int, source: str, negated: bool) -> Register:
        register = self._find(name)
        if register is None:
            raise PtxError(line, source, f"register {name} is not declared")
        return Register(register.number, register.type, name, True) if negated else register

    # -- operands -----------------------------------------------------------------------------------------------
    def operand(self, text: str, line: int, source: str, depth: int = 0):
        if depth > 8:
            raise PtxError(line, source, "operands nest too deeply")
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self.operand(x, line, source, depth + 1) for x in split(text[1:-1])))
        if text.startswith("["):
            return self._address(text, line, source)
        if "|" in text:
            return Vector(tuple(self.operand(x.strip(), line, source, depth + 1) for x in text.split("|")))
        if text == "_":
            return None
        if text.startswith("!"):
            return self._register(text[1:].strip(), line, source, True)
        constant = _constant(text, line)
        if constant is not None:
            return constant
        if _SPECIAL.match(text):
            return Special(text.lstrip("%"))
        register = self._find(text)
        if register is not None:
            return register
        vector = next((scope.vectors[text] for scope in reversed(self.scopes) if text in scope.vectors), None)
        return vector or self._symbol(text, line, source)

    def _symbol(self, text: str, line: int, source: str) -> Symbol:
        symbol = re.match(rf"(?:generic\s*\(\s*)?({IDENT})(?:\s*\))?(?:\s*\+\s*(\w+))?$", text)
        name = self.variable_name(symbol[1]) if symbol else None
        if name is None:
            raise PtxError(
                line, source, f"operand {text!r} is no declared register, variable, constant or special register"
            )
        return Symbol(name, integer(symbol[2], line) if symbol[2] else 0)

    def _address(self, text: str, line: int, source: str) -> Address:
        if "," in text:
            return self._tensor_address(text, line, source)
        match = re.match(rf"\[\s*({IDENT}|\w+)\s*(?:([+-])\s*(-?\w+))?\s*\]$", text)
        if not match:
            raise PtxError(line, source, f"address {text!r} not understood (expected [base] or [base+offset])")
        base = self.operand(match[1], line, source)
        offset = integer(match[3], line) if match[3] else 0
        return Address(base, -offset if match[2] == "-" else offset)

    def _tensor_address(self, text: str, line: int, source: str) -> Address:
        """``[map, {c0, …}]``: the address of a tensor map and tile coordinates."""
        parts = split(text[1:-1])
        vector = self.operand(parts[1], line, source) if len(parts) == 2 else None
        if not isinstance(vector, Vector) or "," in parts[0]:
            raise PtxError(line, source, f"address {text!r} not understood (expected [map, {{coordinates}}])")
        plain = self._address(f"[{parts[0]}]", line, source)
        return Address(plain.base, plain.offset, vector.items)


def _constant(text: str, line: int) -> Immediate | None:
    if INTEGER.match(text):
        return Immediate(integer(text, line))
    exact = float_bits(text)
    if exact:
        return Immediate(exact[0], "f32" if exact[1] == 4 else "f64")
    return Immediate(float(text), "decimal") if DECIMAL.match(text) and len(text) < 80 else None
