"""Parser for the PTX that NVVM emits for CuTe DSL kernels (ISA 9.3), inline-assembly scopes included.

Our own and not pyptx (Apache, alpha): an alpha dependency whose syntax tree adds nothing to the flat statement list
that the code generator wants. Anything not understood is a PtxError with its line; nothing is skipped but comments,
``.loc``, ``.file``, ``.pragma`` and debug sections, which do not change what a kernel computes.
"""

from __future__ import annotations

import re

from ..errors import PtxError
from .records import (
    Address,
    Immediate,
    Instruction,
    KernelText,
    Label,
    ModuleText,
    Param,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)

BYTES = {
    "pred": 0,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$|"
    r"%(laneid|warpid|nwarpid|smid|nsmid|gridid|lanemask_(eq|lt|le|gt|ge)|cluster_ctarank|"
    r"cluster_nctarank|clock|clock64|globaltimer|dynamic_smem_size|total_smem_size|is_explicit_cluster)$"
)
_IDENT = r"[%$A-Za-z_][\w$]*"
_LABEL = re.compile(rf"({_IDENT})\s*:(?!:)")
_DEBUG = re.compile(r"\.(loc|file)\b")
_SPACE = re.compile(r"\s+")
_INT = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_VARIABLE = re.compile(rf"(?:\.align\s+(\d+)\s*)?\.(\w+)\s+({_IDENT})\s*(?:\[(\d*)\])?$")
_INSTRUCTION = re.compile(rf"(?:@(!?)({_IDENT})\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)$", re.S)


def parse(text: str) -> ModuleText:
    """Parse a PTX module; raises PtxError for anything outside the accepted subset."""
    return _ModuleParser(_without_comments(text)).parse()


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*out, last] if last else out


def _variable(text: str, line: int, external: bool = False) -> Variable:
    match = _VARIABLE.match(text.strip())
    if not match or match[2] not in BYTES:
        raise PtxError(line, text, "variable declaration not understood; teach the parser this form")
    align, kind, name, count = match.groups()
    elements = 1 if count is None else int(count or 0)
    return Variable(name=name, size=elements * BYTES[kind], align=int(align or BYTES[kind]), external=external)


class _Scope:
    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[str, Register] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.labels: set[str] = set()


class _ModuleParser:
    def __init__(self, text: str) -> None:
        self.text, self.pos = text, 0
        self.target = self.version = ""
        self.shared: list[Variable] = []
        self.kernels: dict[str, KernelText] = {}

    def line(self, pos: int) -> int:
        return self.text.count("\n", 0, pos) + 1

    def parse(self) -> ModuleText:
        head = re.compile(
            r"\s*(?:(\.(?:version|target|address_size|file|loc)\b[^\n]*)|(\.section\b)|"
            r"((?:\.visible\s+|\.weak\s+)?\.entry\b)|([^;{]+;))"
        )
        while self.text[self.pos :].strip():
            match = head.match(self.text, self.pos)
            if not match:
                raise PtxError(
                    self.line(self.pos),
                    self.text[self.pos :].strip().split("\n")[0],
                    "module-level text not understood; only kernels and shared variables are supported",
                )
            if match[3]:
                self._entry(match.start(3))
            else:
                self.pos = match.end()
                if match[2]:
                    self.pos = self.text.index("}", self.pos) + 1
                elif match[1]:
                    self._directive(match[1])
                else:
                    self._module_variable(match[4], match.start(4))
        if not self.target:
            raise PtxError(1, self.text[:60].strip(), "no .target directive: this is not a PTX module")
        return ModuleText(target=self.target, version=self.version, kernels=self.kernels)

    def _directive(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == ".target":
            self.target = rest.split(",")[0].strip()
        elif name == ".version":
            self.version = rest.strip()

    def _module_variable(self, text: str, pos: int) -> None:
        match = re.match(r"((?:\.(?:extern|visible|weak|common)\s+)*)\.shared\s+(.*);$", text.strip(), re.S)
        if not match:
            raise PtxError(
                self.line(pos), " ".join(text.split()), "only .shared variables are supported at module level"
            )
        self.shared.append(_variable(" ".join(match[2].split()), self.line(pos), "extern" in match[1]))

    def _entry(self, start: int) -> None:
        match = re.compile(rf"(?:\.\w+\s+)?\.entry\s+({_IDENT})\s*(?:\(([^)]*)\))?([^{{]*)\{{").match(self.text, start)
        if not match:
            raise PtxError(self.line(start), self.text[start : start + 60], "kernel header not understood")
        kernel = KernelText(
            name=match[1],
            params=self._params(match[2] or "", start),
            required_threads=self._threads(match[3]),
            shared=list(self.shared),
        )
        self.pos = _BodyParser(self.text, match.end(), self.line(match.end()), kernel).parse()
        self.kernels[kernel.name] = kernel

    def _params(self, text: str, pos: int) -> tuple[Param, ...]:
        params, offset = [], 0
        for item in _split(text):
            plain = re.sub(r"\.ptr(?:\s+\.(?:global|shared|local|const))?(?:\s+\.align\s+\d+)?", "", item)
            var = _variable(" ".join(re.sub(r"^\.param\s+", "", plain.strip()).split()), self.line(pos))
            offset = -(-offset // var.align) * var.align
            params.append(Param(name=var.name, size=var.size, align=var.align, offset=offset))
            offset += var.size
        return tuple(params)

    @staticmethod
    def _threads(text: str) -> tuple[int, int, int] | None:
        match = re.search(r"\.reqntid\s+([\d,\s]+)", text)
        if not match:
            return None
        numbers = [int(x) for x in match[1].split(",")]
        return tuple([*numbers, 1, 1][:3])


class _BodyParser:
    """Walks one kernel body statement by statement, keeping the stack of scopes."""

    def __init__(self, text: str, pos: int, line: int, kernel: KernelText) -> None:
        self.text, self.pos, self.kernel = text, pos, kernel
        self.at, self.at_line = pos, line
        self.scopes = [_Scope(0)]
        self.opened = 0
        self.params = {p.name for p in kernel.params}

    def line(self) -> int:
        self.at_line += self.text.count("\n", self.at, self.pos)
        self.at = self.pos
        return self.at_line

    def parse(self) -> int:
        text = self.text
        while True:
            space = _SPACE.match(text, self.pos)
            if space:
                self.pos = space.end()
            ch = text[self.pos : self.pos + 1]
            if not ch:
                raise PtxError(self.line(), "", "the kernel's body has no closing brace; the text is cut off")
            if ch == "{":
                self._open()
            elif ch == "}":
                self.pos += 1
                self.scopes.pop()
                if not self.scopes:
                    break
            elif ch == ";":
                self.pos += 1
            elif label := _LABEL.match(text, self.pos):
                self._place(label[1])
                self.pos = label.end()
            elif _DEBUG.match(text, self.pos):
                self.pos = text.index("\n", self.pos)
            else:
                self._statement()
        self._check_labels()
        return self.pos

    def _open(self) -> None:
        self.opened += 1
        scope = _Scope(self.opened)
        end = self._matching(self.pos)
        scope.labels = {m[1] for m in re.finditer(rf"(?:^|[;{{}}\n])\s*({_IDENT})\s*:(?!:)", self.text[self.pos : end])}
        self.scopes.append(scope)
        self.pos += 1

    def _matching(self, start: int) -> int:
        depth = 0
        for brace in re.compile(r"[{}]").finditer(self.text, start):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return brace.start()
        raise PtxError(self.line(), "{", "this scope has no closing brace; the text is cut off")

    def _place(self, name: str) -> None:
        label = self._label(name)
        if label in self.kernel.labels:
            raise PtxError(self.line(), name, f"label {name} is defined twice in one scope")
        self.kernel.labels[label] = len(self.kernel.instructions)

    def _label(self, name: str) -> str:
        for scope in reversed(self.scopes[1:]):
            if name in scope.labels:
                return f"{name}@{scope.number}"
        return name

    def _check_labels(self) -> None:
        for ins in self.kernel.instructions:
            for operand in ins.operands:
                if isinstance(operand, Label) and operand.name not in self.kernel.labels:
                    raise PtxError(
                        ins.line, ins.text, f"branch to label {operand.name}, which the kernel does not define"
                    )

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
            raise PtxError(line, source, "statement not understood")
        guard = self._register(match[2], line, source, match[1] == "!") if match[2] else None
        modifiers = tuple(match[4].split(".")[1:])
        parts = _split(match[5])
        if match[3] in ("bra", "brx"):
            operands = tuple(Label(self._label(p)) for p in parts)
        else:
            operands = tuple(self._operand(p, line, source) for p in parts)
        self.kernel.instructions.append(Instruction(match[3], modifiers, operands, guard, line, source))

    def _declare(self, source: str, line: int) -> None:
        kind, _, rest = source.partition(" ")
        if kind == ".reg":
            self._registers(rest, line)
        elif kind == ".shared":
            self.kernel.shared.append(_variable(rest, line))
        elif kind == ".local":
            self.kernel.local.append(_variable(rest, line))
        elif kind != ".pragma":
            raise PtxError(line, source, f"directive {kind} is not supported; add it to the parser with a test")

    def _registers(self, rest: str, line: int) -> None:
        kind, _, names = rest.strip().lstrip(".").partition(" ")
        if kind not in BYTES:
            raise PtxError(line, rest, f"register type .{kind} is not known")
        for name in _split(names):
            ranged = re.match(rf"({_IDENT})<(\d+)>$", name)
            if ranged:
                self.scopes[-1].ranges.append((ranged[1], int(ranged[2]), kind))
            else:
                self._new_register(name, kind, self.scopes[-1])

    def _new_register(self, name: str, kind: str, scope: _Scope) -> Register:
        register = Register(len(self.kernel.registers), kind, name)
        self.kernel.registers.append(register)
        scope.names[name] = register
        return register

    def _find(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
            for prefix, count, kind in scope.ranges:
                if name.startswith(prefix) and name[len(prefix) :].isdigit() and int(name[len(prefix) :]) < count:
                    return self._new_register(name, kind, scope)
        return None

    def _register(self, name: str, line: int, source: str, negated: bool) -> Register:
        register = self._find(name)
        if register is None:
            raise PtxError(line, source, f"register {name} is not declared")
        return Register(register.number, register.type, name, True) if negated else register

    def _operand(self, text: str, line: int, source: str):
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self._operand(x, line, source) for x in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text, line, source)
        if "|" in text:
            return Vector(tuple(self._operand(x.strip(), line, source) for x in text.split("|")))
        if text == "_":
            return None
        if text.startswith("!"):
            return self._register(text[1:].strip(), line, source, True)
        if _INT.match(text):
            return Immediate(_integer(text))
        if float_ := re.match(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$", text):
            return Immediate(int(float_[1] or float_[2], 16), "f32" if float_[1] else "f64")
        if _SPECIAL.match(text):
            return Special(text[1:])
        register = self._find(text)
        if register is not None:
            return register
        symbol = re.match(rf"({_IDENT})(?:\s*\+\s*(\w+))?$", text)
        if symbol and (symbol[1] in self.params or self._is_variable(symbol[1])):
            return Symbol(symbol[1], _integer(symbol[2]) if symbol[2] else 0)
        raise PtxError(
            line, source, f"operand {text!r} is no declared register, variable, constant or special register"
        )

    def _is_variable(self, name: str) -> bool:
        return any(v.name == name for v in (*self.kernel.shared, *self.kernel.local))

    def _address(self, text: str, line: int, source: str) -> Address:
        match = re.match(rf"\[\s*({_IDENT}|\w+)\s*(?:\+\s*(-?\w+))?\s*\]$", text)
        if not match:
            raise PtxError(line, source, f"address {text!r} not understood (expected [base] or [base+offset])")
        base = self._operand(match[1], line, source)
        return Address(base, _integer(match[2]) if match[2] else 0)


def _integer(text: str) -> int:
    return int(text.rstrip("U"), 0) if not re.match(r"-?0\d+$", text) else int(text, 8)
