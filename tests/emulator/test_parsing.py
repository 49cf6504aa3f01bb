"""The parser and the opcode table: what is accepted, and how refusals read."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import HEAD, THREADS, apply, kernel_text, launch

from kernel_factory.emulator import PtxError, load
from kernel_factory.emulator.ptx import Register, parse


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("tex.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [%d0];", "opcode tex is not emulated"),
        ("add.up.f32 %r1, %r2, %r3;", "modifier .up is not emulated"),
        ("ld.global.hurried.b32 %r1, [%d0];", "modifier .hurried is not emulated"),
        (
            "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%r1,%r2}, {%r1}, {%r2}, {%r1,%r2};",
            "type .s32",
        ),
        ("add.s32 %r1, %r2, %nothing;", "no declared register"),
        ("add.s32 %r1, %r2, %r99;", "no declared register"),
        ("bra NOWHERE;", "label NOWHERE"),
        ("mov.b32 %r1, %d0;", ""),
        ("add.s32 %p1, %r1, %r2;", "cannot go to a register of type .pred"),
        (".callprototype foo;", "directive .callprototype"),
    ],
)
def test_what_is_not_emulated_is_refused_with_its_line(statement, message):
    """Unknown opcodes, modifiers, names and forms raise PtxError with line, text and reason; nothing is guessed."""
    text = kernel_text(f"mov.b32 %r1, 0;\n{statement}")
    if not message:
        load(text)  # a truncating read of a wider register is allowed
        return
    with pytest.raises(PtxError) as caught:
        load(text)
    line = 1 + text[: text.index(statement)].count("\n")
    assert message in caught.value.message
    assert caught.value.line == line and caught.value.text.split()[0] == statement.rstrip(";").split()[0]


def test_nested_scopes_redeclare_registers_and_labels():
    """Inline-assembly scopes have their own registers and labels, twice in one kernel."""
    block = """{
    .reg .pred p; .reg .b32 t;
    mov.b64 {t, %r7}, %d9;
    setp.lt.u32 p, %a, LIMIT;
    @p bra DONE;
    add.s32 %a, %a, 1000;
    DONE:
    }
    """
    body = "mov.b64 %d9, 0;" + block.replace("LIMIT", "10") + block.replace("LIMIT", "1020") + "mov.b32 %o, %a;"
    a = np.arange(THREADS, dtype=np.uint32)
    want = [x if x < 10 else x + 1000 for x in range(THREADS)]
    want = [x if x < 1020 else x + 1000 for x in want]
    assert apply(body, {"a": a}, {"o": np.uint32})["o"].tolist() == want


def test_comments_debug_directives_and_pragmas_do_not_matter():
    """Comments, .loc, .file, .pragma and debug sections leave the statement list as it is."""
    noisy = (
        HEAD + '.file 1 "a.py"\n.visible .entry k()\n{\n.reg .b32 %r<3>; // registers\n/* two\nlines */ .loc 1 2 3\n'
        '.pragma "nounroll";\nmov.b32 %r1, 5; // end\nret;\n}\n.section .debug_str { .b8 0 }\n'
    )
    kernel = parse(noisy).kernels["k"]
    assert [(i.opcode, i.line) for i in kernel.instructions] == [("mov", 11), ("ret", 12)]
    assert isinstance(kernel.instructions[0].operands[0], Register)


def test_modules_are_cached_by_content_without_target_and_version():
    """Equal text for two SMs shares its compiled kernels; the module still names its own target."""
    text = kernel_text("mov.b32 %r1, 12345;")
    first, second = load(text), load(text.replace("sm_80", "sm_100a").replace("9.3", "9.2"))
    assert (first.target, second.target, second.version) == ("sm_80", "sm_100a", "9.2")
    assert first.kernels["k"] is second.kernels["k"] and first.digest == second.digest
    assert load(text.replace("12345", "12346")).kernels["k"] is not first.kernels["k"]


def test_the_latest_used_modules_are_kept():
    """A long suite of texts does not fill the memory: the oldest is forgotten, what is in use is not."""
    oldest, used = (load(kernel_text(f"mov.b32 %r1, {n};")) for n in (990, 991))
    for n in range(70):
        load(kernel_text(f"mov.b32 %r1, {n};"))
        assert load(kernel_text("mov.b32 %r1, 991;")).kernels["k"] is used.kernels["k"]
    assert load(kernel_text("mov.b32 %r1, 990;")).kernels["k"] is not oldest.kernels["k"]


def test_a_text_that_is_no_module_is_refused():
    """Cut-off text and text without a target are errors, not empty modules."""
    with pytest.raises(PtxError, match="no closing brace"):
        load(HEAD + ".visible .entry k()\n{\n.reg .b32 %r<3>;\nmov.b32 %r1, 5;\n")
    with pytest.raises(PtxError):
        load("hello")


def test_kernel_facts_are_exported():
    """Parameters with offsets, static shared memory and required threads are read from the text."""
    text = HEAD + (
        ".visible .entry k(.param .u32 a, .param .u64 .ptr .global .align 16 b, .param .align 64 .b8 c[128])\n"
        ".reqntid 128, 1, 1\n{\n.shared .align 16 .b8 tile[100];\n.reg .b32 %r<2>;\nmov.u32 %r1, tile;\nret;\n}\n"
    )
    kernel = load(text).kernels["k"]
    assert [(p.name, p.size, p.align, p.offset) for p in kernel.params] == [
        ("a", 4, 4, 0),
        ("b", 8, 8, 8),
        ("c", 128, 64, 64),
    ]
    assert kernel.static_shared == 100 and kernel.required_threads == (128, 1, 1)


def test_vector_registers_have_named_elements():
    """``.reg .v4`` declares four registers, named by .x to .w and all together by the vector's name."""
    body = ".reg .v4 .b32 %v; mov.u32 %r0, %tid.x; mov.b32 %v.x, %r0; add.u32 %v.y, %v.x, 1; add.u32 %v.z, %v.y, 1;"
    body += "mov.b32 %v.w, 9; ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r0, 16; add.s64 %d0, %d0, %d1;"
    result, memory = launch(body + "st.global.v4.b32 [%d0], %v;", {"dst": 16 * 64})
    assert result.ok
    assert memory.read("dst", np.uint32, (64, 4)).tolist() == [[i, i + 1, i + 2, 9] for i in range(64)]
