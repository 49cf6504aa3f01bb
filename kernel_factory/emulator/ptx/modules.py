"""Module level of PTX: directives, variables, functions and kernels (PTX ISA 5.4, 11.1).

Kernels are parsed after everything else has been seen, because a call is expanded in place and the function may come
later in the text.
"""

from __future__ import annotations

import re

from ..errors import PtxError
from .parser import BodyParser
from .records import Function, KernelText, ModuleText, Param, Variable
from .variables import module_variable, variable
from .words import IDENT, split, without_comments

_HEAD = re.compile(
    r"\s*(?:(\.(?:version|target|address_size|file|loc)\b[^\n]*)|(\.section\b)|"
    r"((?:\.(?:visible|weak|extern)\s+)*\.(?:entry|func)\b)|(\.pragma\b[^;\n]*;)|([^;{]+(?:\{[^;]*?\}\s*)?;))"
)
_ENTRY = re.compile(rf"(?:\.\w+\s+)*\.entry\s+({IDENT})\s*(?:\(([^)]*)\))?([^{{;]*)([{{;])")
_FUNCTION = re.compile(
    rf"(?:\.\w+\s+)*\.func\b\s*(?:\.attribute\s*\([^)]*\)\s*)?(?:\(([^)]*)\)\s*)?({IDENT})\s*(?:\(([^)]*)\))?"
    r"([^{;]*)([{;])"
)


def parse(text: str) -> ModuleText:
    """Parse a PTX module; raises PtxError for anything outside the accepted subset."""
    return ModuleParser(without_comments(text)).parse()


class ModuleParser:
    """Walks the module-level statements."""

    def __init__(self, text: str) -> None:
        self.text, self.pos = text, 0
        self.target = self.version = ""
        self.variables: list[Variable] = []
        self.functions: dict[str, Function] = {}
        self.entries: list[tuple[re.Match, int]] = []

    def line(self, pos: int) -> int:
        return self.text.count("\n", 0, pos) + 1

    def parse(self) -> ModuleText:
        while self.text[self.pos : self.pos + 4096].strip() or self.text[self.pos :].strip():
            match = _HEAD.match(self.text, self.pos)
            if not match:
                raise self._fail(self.pos, "module-level text not understood; expected a kernel, function or variable")
            directive, section, code, pragma, declaration = match.groups()
            self.pos = match.end()
            if code:
                self._code(match.start(3))
            elif section:
                self.pos = self._closing(self.text.find("{", self.pos))
            elif directive:
                self._directive(directive)
            elif not pragma and declaration.strip() != ";":
                self.variables.append(module_variable(declaration, self.line(match.start(5))))
        if not self.target:
            raise PtxError(1, self.text[:60].strip(), "no .target directive: this is not a PTX module")
        kernels = {}
        for header, start in self.entries:
            kernels[header[1]] = self._kernel(header, start)
        return ModuleText(target=self.target, version=self.version, kernels=kernels)

    def _fail(self, pos: int, message: str) -> PtxError:
        return PtxError(self.line(pos), self.text[pos : pos + 80].strip().split("\n")[0], message)

    def _directive(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == ".target":
            self.target = rest.split(",")[0].strip()
        elif name == ".version":
            self.version = rest.strip()

    def _closing(self, start: int) -> int:
        """Position after the brace that closes the one at ``start``."""
        if start < 0:
            raise self._fail(self.pos, "expected an opening brace")
        depth = 0
        for brace in re.compile(r"[{}]").finditer(self.text, start):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return brace.end()
        raise self._fail(start, "no closing brace; the text is cut off")

    def _code(self, start: int) -> None:
        entry = _ENTRY.match(self.text, start)
        header = entry or _FUNCTION.match(self.text, start)
        if not header:
            raise self._fail(start, "kernel or function header not understood")
        body = header.end() - 1 if header.groups()[-1] == "{" else -1
        self.pos = header.end() if body < 0 else self._closing(body)
        if entry:
            if body >= 0:
                self.entries.append((header, start))
            return
        returns, name, params = header.groups()[:3]
        known = self.functions.get(name)
        if known is None or known.body < 0:
            self.functions[name] = Function(
                name=name,
                returns=self._names(returns or "", start),
                params=self._names(params or "", start),
                body=body,
                line=self.line(max(body, 0)),
            )

    def _names(self, text: str, pos: int) -> tuple[str, ...]:
        """Names of a function's parameters; "" for one in a register."""
        out = []
        for item in split(text):
            if item.startswith(".reg"):
                out.append("")
            else:
                out.append(self._param(item, pos).name)
        return tuple(out)

    def _param(self, item: str, pos: int) -> Variable:
        plain = re.sub(r"\.ptr(?:\s*\.(?:global|shared|local|const))?(?:\s*\.align\s+\d+)?", "", item)
        return variable(" ".join(re.sub(r"^\.param\s+", "", plain.strip()).split()), self.line(pos))

    def _kernel(self, header: re.Match, start: int) -> KernelText:
        kernel = KernelText(
            name=header[1],
            params=self._params(header[2] or "", start),
            required_threads=self._triple("reqntid", header[3], start),
            required_cluster=self._triple("reqnctapercluster", header[3], start),
            shared=[v for v in self.variables if v.space == "shared"],
            variables=[v for v in self.variables if v.space != "shared"],
        )
        BodyParser(self.text, header.end(), self.line(header.end()), kernel, self.functions).parse()
        return kernel

    def _params(self, text: str, pos: int) -> tuple[Param, ...]:
        params, offset = [], 0
        for item in split(text):
            var = self._param(item, pos)
            if var.align < 1:
                raise self._fail(pos, f"alignment {var.align} of a parameter")
            offset = -(-offset // var.align) * var.align
            params.append(Param(name=var.name, size=var.size, align=var.align, offset=offset))
            offset += var.size
        return tuple(params)

    def _triple(self, directive: str, text: str, pos: int) -> tuple[int, int, int] | None:
        match = re.search(rf"\.{directive}\s+([\d,\s]+)", text)
        if not match:
            return None
        numbers = re.findall(r"\d+", match[1])
        if not 1 <= len(numbers) <= 3 or max(map(len, numbers)) > 9:
            raise self._fail(pos, f"directive .{directive} takes one to three numbers")
        return tuple([*map(int, numbers), 1, 1][:3])
