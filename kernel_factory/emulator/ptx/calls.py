"""Calls of device functions and indexed branches, expanded in place (PTX ISA 9.7.12.4, 9.7.12.5 and 5.1.6).

A call becomes the function's own statements: ``.param`` variables are bytes of the thread's local memory, the
callee's formal names stand for the caller's variables, and ``ret`` is a branch to the end. So there is no stack, and
neither recursion nor calls through a pointer. ``vprintf`` prints nothing; ``__assertfail`` is a finding.
An indexed branch becomes a comparison and a branch for each target.
"""

from __future__ import annotations

from ..errors import PtxError
from .records import Address, Function, Immediate, Label, Register, Symbol
from .words import split

DEEPEST_CALL = 24
MOST_INSTRUCTIONS = 400_000


def call(parser: object, guard: Register | None, text: str, line: int, source: str) -> None:
    """Expand ``call (ret), name, (args)``."""
    parts = split(text)
    returns = parts.pop(0) if parts and parts[0].startswith("(") else ""
    if not parts:
        raise PtxError(line, source, "call without a function")
    name, actuals = parts[0], parts[1] if len(parts) > 1 else ""
    function = parser.functions.get(name)
    if function is None:
        raise PtxError(
            line, source, f"call of {name}: calls through a pointer or of undeclared functions do not run here"
        )
    names = _names(parser, function, returns, actuals, line, source)
    skip = None
    if guard:
        skip = parser.fresh_label("skip")
        parser.add("bra", (), (Label(skip),), _opposite(guard), line, source)
    if function.body >= 0:
        _inline(parser, function, names, line, source)
    else:
        _library(parser, function, names, line, source)
    if skip:
        parser.place_raw(skip)


def behind_branch(parser, guard: Register, opcode: str, modifiers: tuple, parts: list, line: int, source: str) -> None:
    """A guarded collective or barrier: the other lanes branch around it, so that it never sees a guard."""
    skip = parser.fresh_label("skip")
    parser.add("bra", (), (Label(skip),), _opposite(guard), line, source)
    parser.add(opcode, modifiers, parser.operands(opcode, modifiers, parts, line, source), None, line, source)
    parser.place_raw(skip)


def _opposite(register: Register) -> Register:
    return Register(register.number, register.type, register.name, not register.negated)


def _names(parser, function: Function, returns: str, actuals: str, line: int, source: str) -> dict[str, str]:
    """Formal name to the caller's variable."""
    formal = [*function.returns, *function.params]
    actual = [*split(returns.strip("() ")), *split(actuals.strip("() "))]
    if len(formal) != len(actual) or "" in formal:
        raise PtxError(line, source, f"{function.name} takes {len(formal)} .param values, the call gives {len(actual)}")
    out = {}
    for inner, outer in zip(formal, actual, strict=True):
        found = parser.variable_name(outer)
        if found is None:
            raise PtxError(line, source, f"argument {outer} is no .param variable of the caller")
        out[inner] = found
    return out


def _inline(parser, function: Function, names: dict[str, str], line: int, source: str) -> None:
    if len(parser.returns) >= DEEPEST_CALL or len(parser.kernel.instructions) > MOST_INSTRUCTIONS:
        raise PtxError(line, source, f"{function.name}: calls nest too deeply (recursion does not run here)")
    end = parser.fresh_label("return")
    saved = parser.pos, parser.at, parser.at_line
    parser.pos, parser.at, parser.at_line = function.body, function.body, function.line
    parser.returns.append(end)
    parser.functions_open.append(function.name)
    depth = len(parser.scopes)
    parser.open_scope()
    parser.scopes[-1].variables.update(names)
    parser.statements(depth)
    parser.functions_open.pop()
    parser.returns.pop()
    parser.place_raw(end)
    parser.pos, parser.at, parser.at_line = saved


def _library(parser, function: Function, names: dict[str, str], line: int, source: str) -> None:
    if function.name == "vprintf" and function.returns:
        target = Address(Symbol(names[function.returns[0]]))
        parser.add("st", ("local", "b32"), (target, Immediate(0)), None, line, source)
    elif function.name in ("__assertfail", "__assert_fail"):
        parser.add("assertfail", (), (), None, line, source)
    else:
        raise PtxError(line, source, f"library function {function.name} is not emulated")


def targets(parser: object, name: str | None, text: str, line: int) -> None:
    """``name: .branchtargets L0, L1, …;``"""
    if name is None:
        raise PtxError(line, text[:80], ".branchtargets needs a label before it")
    parser.scopes[-1].tables[name] = tuple(parser.label(x) for x in split(text))


def indexed_branch(parser: object, guard: Register | None, text: str, line: int, source: str) -> None:
    """Expand ``brx.idx index, table``."""
    parts = split(text)
    table = next(
        (s.tables[parts[1]] for s in reversed(parser.scopes) if len(parts) == 2 and parts[1] in s.tables), None
    )
    if table is None:
        raise PtxError(line, source, "brx.idx needs an index and a .branchtargets list declared before it")
    index = parser.operand(parts[0], line, source)
    skip = parser.fresh_label("skip") if guard else ""
    if guard:
        parser.add("bra", (), (Label(skip),), _opposite(guard), line, source)
    for number, label in enumerate(table):
        hit = parser.new_register(f"$brx{len(parser.kernel.registers)}", "pred", parser.scopes[-1])
        parser.add("setp", ("eq", "u32"), (hit, index, Immediate(number)), None, line, source)
        parser.add("bra", (), (Label(label),), hit, line, source)
    parser.add("trap", (), (), None, line, source)
    if guard:
        parser.place_raw(skip)
