"""mov with its packing forms, selp, slct, setp, and address conversions."""

from __future__ import annotations

from ..emitter import NUMPY, Emitter, Modifiers, size_of
from ..ptx.records import Instruction, Vector
from ..registry import emits
from .packed import decode

_SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@emits("mov")
def move(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mov of registers, constants, special registers and addresses; vectors pack and unpack."""
    dtype = NUMPY[mods.type()]
    dtype = dtype if dtype in ("bool", "c16") else f"u{8 * size_of(dtype)}"
    dst, source = e.operands(2)
    if isinstance(source, Vector):
        _pack(e, dst, source.items, dtype)
    elif isinstance(dst, Vector):
        _unpack(e, dst.items, source, dtype)
    else:
        e.set(dst, e.value(source, dtype), dtype)


def _pack(e: Emitter, dst: object, items: tuple, dtype: str) -> None:
    part = f"u{8 * size_of(dtype) // len(items)}"
    x = [e.value(i, part) for i in items]
    if len(items) == 2 and dtype in ("u64", "c16"):
        e.set(dst, f"{'pack64' if dtype == 'u64' else 'pack128'}({x[0]}, {x[1]})", dtype)
    elif dtype == "c16":
        raise e.fail("packing into 128 bits is emulated from two 64-bit parts only")
    else:
        shifted = [f"({v}.astype({dtype}) << {dtype}({i * int(part[1:])}))" for i, v in enumerate(x)]
        e.set(dst, f"({' | '.join(shifted)})", dtype)


def _unpack(e: Emitter, items: tuple, source: object, dtype: str) -> None:
    part = f"u{8 * size_of(dtype) // len(items)}"
    x = e.value(source, dtype)
    for i, item in enumerate(items):
        if dtype == "c16":
            e.set(item, f"np.ascontiguousarray({x}).view({part}).reshape(-1, {len(items)})[:, {i}].copy()", part)
        else:
            e.set(item, f"({x} >> {dtype}({i * int(part[1:])})).astype({part})", part)


@emits("selp")
def select(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Select by predicate."""
    dtype = NUMPY[mods.type()]
    dst, a, b, p = e.operands(4)
    e.set(dst, f"np.where({e.value(p, 'bool')}, {e.value(a, dtype)}, {e.value(b, dtype)})", dtype)


@emits("slct")
def select_by_sign(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Select by the sign of the last operand."""
    by = NUMPY[mods.type("s32", "f32")]
    dtype = NUMPY[mods.type()]
    sign = "ftz({})" if mods.take("ftz") else "{}"
    dst, a, b, c = e.operands(4)
    e.set(dst, f"np.where({sign.format(e.value(c, by))} >= {by}(0), {e.value(a, dtype)}, {e.value(b, dtype)})", dtype)


@emits("setp")
def set_predicate(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Compare, with an optional combination with a third predicate and a complementary second result."""
    kind = mods.type()
    flush = mods.take("ftz")
    compare = mods.left.pop(0) if mods.left else ""
    logic = mods.take(*_LOGIC)
    dst, a, b, *rest = ins.operands
    if kind in ("bf16x2", "f16x2"):
        _pair_predicates(e, kind, compare, logic, flush)
        return
    result = _compare(e, kind, compare, _operand(e, a, kind, flush), _operand(e, b, kind, flush))
    targets = dst.items if isinstance(dst, Vector) else (dst,)
    other = f"(~{result})"
    if logic:
        third = e.value(rest[0], "bool")
        result, other = f"({result} {_LOGIC[logic]} {third})", f"({other} {_LOGIC[logic]} {third})"
    elif rest:
        raise e.fail("setp has a third source but no .and, .or or .xor")
    e.set(targets[0], result, "bool")
    if len(targets) > 1:
        e.set(targets[1], other, "bool")


def _pair_predicates(e: Emitter, kind: str, compare: str, logic: str | None, flush: str | None) -> None:
    """setp of two halves: a predicate for each."""
    dst, a, b, *rest = e.ins.operands
    if not isinstance(dst, Vector) or len(dst.items) != 2 or len(rest) != bool(logic):
        raise e.fail("setp of two halves writes p|q, and takes a third source with .and, .or or .xor only")
    for item, x, y in zip(dst.items, _halves(e, a, kind, flush), _halves(e, b, kind, flush), strict=True):
        result = _compare(e, kind[:-2], compare, x, y)
        e.set(item, f"({result} {_LOGIC[logic]} {e.value(rest[0], 'bool')})" if logic else result, "bool")


def _halves(e: Emitter, operand: object, kind: str, flush: str | None) -> list[str]:
    """The values of one or two halves; .ftz flushes subnormal ones."""
    values = decode(e, operand, kind)
    return [f"flush_half({v}, {kind!r})" for v in values] if flush else values


def _operand(e: Emitter, operand: object, kind: str, flush: str | None) -> str:
    if kind in ("bf16", "f16"):
        return _halves(e, operand, kind, flush)[0]
    value = e.value(operand, NUMPY[kind])
    return f"ftz({value})" if flush else value


def _compare(e: Emitter, kind: str, compare: str, a: str, b: str) -> str:
    floating = kind in ("f32", "f64", "f16", "bf16")
    if compare in _UNSIGNED and not floating:
        compare = _UNSIGNED[compare]
    if floating and compare in ("num", "nan"):
        return f"nan_either({a}, {b})" if compare == "nan" else f"(~nan_either({a}, {b}))"
    unordered = floating and len(compare) == 3 and compare.endswith("u")
    symbol = _SYMBOLS.get(compare[:2] if unordered else compare)
    if symbol is None:
        raise e.fail(f"comparison .{compare} of .{kind} is not emulated")
    code = f"({a} {symbol} {b})"
    if floating and symbol == "!=" and not unordered:
        return f"({code} & ~nan_either({a}, {b}))"
    if unordered and symbol != "!=":
        return f"({code} | nan_either({a}, {b}))"
    return code


@emits("cvta")
def convert_address(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Between a state space and generic addresses; global addresses are the same in both."""
    dtype = NUMPY[mods.type("u64", "u32")]
    back = bool(mods.take("to"))
    space = mods.one("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param").split("::")[0]
    dst, a = e.operands(2)
    x = e.value(a, dtype)
    if space in ("global", "const"):
        e.set(dst, x, dtype)
    elif dtype != "u64":
        raise e.fail("generic addresses have 64 bits")
    else:
        e.set(dst, f"({x} {'-' if back else '+'} u64({WINDOWS[space]}))", "u64")


# Generic windows: far from any buffer's address, so that a space mix-up is out of bounds and not silently right.
WINDOWS = {"shared": 1 << 60, "local": 1 << 61, "param": 1 << 62}
