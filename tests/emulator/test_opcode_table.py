"""Every opcode string that the DSL emits (opcodes.txt) parses, has an emitter, and compiles with plausible operands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_factory.emulator import load
from kernel_factory.emulator.registry import find

OPCODES = Path(__file__).with_name("opcodes.txt").read_text().split()
REGISTERS = (
    ".reg .pred %p<9>; .reg .b16 %h<40>; .reg .b32 %r<300>; .reg .b64 %d<40>; .reg .b128 %q<4>;\n"
    ".shared .align 1024 .b8 s[4096];\n"
)


def many(count: int, start: int = 0) -> str:
    return "{" + ", ".join(f"%r{start + i}" for i in range(count)) + "}"


# What follows the opcode: the first pattern that matches decides.
OPERANDS = [
    (r"bra", "END"),
    (r"ret|trap", ""),
    (r"bar\.sync", "0"),
    (r"barrier\.cluster|.*commit_group|.*fence|griddep|tcgen05\.(wait|relinquish)", ""),
    (r"cp\.async\.bulk\.wait_group|cp\.async\.wait_group|wgmma\.wait_group", "0"),
    (r"cp\.async\.bulk\.tensor\.3d\.global", "[%d0, {%r0, %r1, %r2}], [%r3], %d1"),
    (r"cp\.async\.bulk\.tensor\..*multicast", "[%r3], [%d0, {%r0, %r1, %r2}], [%r4], %h1, %d1"),
    (r"cp\.async\.bulk\.tensor", "[%r3], [%d0, {%r0, %r1, %r2}], [%r4], %d1"),
    (r"cp\.async\.c[ag]", "[%r1], [%d0], 16"),
    (r"cvt\..*x2\.f32", "%r1, %r2, %r3"),
    (r"elect", "%r1|%p1, -1"),
    (r"ldmatrix\..*x4", many(4) + ", [%r9]"),
    (r"stmatrix\..*x4", "[%r9], " + many(4)),
    (r"mapa", "%r1, %r2, %r3"),
    (r"mbarrier\.arrive\.expect_tx", "_, [%r1], %r2"),
    (r"mbarrier\.arrive\.shared::cluster", "_, [%r1]"),
    (r"mbarrier\.arrive", "_, [%r1]"),
    (r"mbarrier\.init", "[%r1], 1"),
    (r"mbarrier\.try_wait", "%p1, [%r1], %r2"),
    (r"mma\.sync\.aligned\.m16n8k16", many(4) + ", " + many(4, 4) + ", " + many(2, 8) + ", " + many(4, 10)),
    (r"prefetch", "[%d0]"),
    (r"setmaxnreg", "40"),
    (r"shfl", "%r1|%p1, %r2, 1, 31, -1"),
    (r"tcgen05\.alloc", "[%r1], 32"),
    (r"tcgen05\.commit\..*multicast", "[%r1], %h1"),
    (r"tcgen05\.commit", "[%r1]"),
    (r"tcgen05\.dealloc", "%r1, 32"),
    (r"tcgen05\.ld.*x32", many(32) + ", [%r40]"),
    (r"tcgen05\.mma", "[%r1], %d1, %d2, %r2, %p1"),
    (r"wgmma\.mma_async\..*n128k16", many(64) + ", %d1, %d2, %p1, 1, 1, 0, 0"),
    (r"wgmma\.mma_async\..*n256k16", many(128) + ", %d1, %d2, %p1, 1, 1, 0, 0"),
]  # fmt: skip
WIDTHS = {"8": "%h", "16": "%h", "32": "%r", "64": "%d"}


def operands(opcode: str) -> str:
    """Operands for an opcode: by pattern, else by its types."""
    for pattern, text in OPERANDS:
        if re.match(pattern, opcode):
            return text
    root, types = opcode.split(".")[0], re.findall(r"\.([busf])(\d+)(x2)?(?=\.|$)", opcode)
    if opcode.endswith(".pred"):
        register = last = "%p"
    else:
        bits = (
            str(int(types[-1][1]) * (2 if types[-1][2] else 1)) if types else "16" if opcode.endswith("bf16") else "32"
        )
        register = last = WIDTHS[bits]
        if root == "cvt" and types:
            register = WIDTHS[types[0][1]]
            last = "%h" if opcode.endswith("bf16") else last
    count = int(match[1]) if (match := re.search(r"\.v(\d)", opcode)) else 1
    words = f"{{{', '.join(f'{register}{i + 1}' for i in range(count))}}}" if count > 1 else f"{register}1"
    if root == "ld":
        return f"{words}, [{'p' if '.param' in opcode else '%r9' if '.shared' in opcode else '%d9'}]"
    if root == "st":
        return f"[{'%r9' if '.shared' in opcode else '%d9'}], {words}"
    if root == "setp":
        return f"%p1, {register}1, {register}2"
    if ".wide" in opcode:
        return "%d1, %r1, %r2"
    if root in ("shl", "shr"):
        return f"{register}1, {register}2, %r3"
    if root in ("cvt", "cvta", "mov", "neg", "not", "ex2", "rcp", "rsqrt", "abs"):
        return f"{register}1, {last}2"
    third = {"mad": 3, "fma": 3, "selp": 2, "prmt": 3}.get(root, 2)
    sources = [f"{register}{i + 2}" for i in range(third)] + (["%p1"] if root == "selp" else [])
    return f"{register}1, {', '.join(sources)}"


@pytest.mark.parametrize("opcode", OPCODES)
def test_the_opcode_has_an_emitter_and_compiles(opcode):
    """The table finds an emitter, and a kernel with this one statement loads."""
    name, *modifiers = opcode.split(".")
    assert find(name, tuple(modifiers))[1] is not None
    text = (
        ".version 9.3\n.target sm_100a\n.address_size 64\n.visible .entry k(.param .align 16 .b8 p[64])\n"
        f"{{\n{REGISTERS}{opcode} {operands(opcode)};\nEND:\nret;\n}}\n"
    )
    assert load(text).kernels["k"].program.blocks
