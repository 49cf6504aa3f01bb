"""Device functions, indexed branches, module variables, local memory, generic addresses, and strong accesses."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import HEAD, THREADS, kinds, launch

from kernel_factory.emulator import LaunchConfig, Memory, PtxError, load, run

AT = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;"
STORE = "st.global.u32 [%d0], {0};"
FUNCTIONS = """
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.func (.param .b32 out) later (.param .b32 a);
.func (.param .b32 out) square (.param .b32 a) {
 .reg .b32 %r<4>; .reg .pred %p<2>;
 ld.param.b32 %r1, [a]; mul.lo.s32 %r2, %r1, %r1; st.param.b32 [out+0], %r2;
 setp.lt.u32 %p1, %r1, 8; @%p1 ret;
 add.s32 %r2, %r2, 1000; st.param.b32 [out+0], %r2; ret;
}
.func (.param .b32 out) later (.param .b32 a) {
 .reg .b32 %r<4>; .local .align 4 .b8 depot[8]; .reg .b64 %d<3>;
 ld.param.b32 %r1, [a]; mov.u64 %d1, depot; st.local.b32 [%d1+4], %r1;
 { .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; call.uni (y), square, (x); ld.param.b32 %r2, [y]; }
 ld.local.b32 %r3, [%d1+4]; add.s32 %r2, %r2, %r3; st.param.b32 [out], %r2; ret;
}
.func loop (.param .b32 a) { { .param .b32 x; call loop, (x); } ret; }
"""


def call(name: str, source: str, result: str) -> str:
    return (
        f"{{ .param .b32 p0; .param .b32 r0; st.param.b32 [p0], {source}; call.uni (r0), {name}, (p0);"
        f"ld.param.b32 {result}, [r0]; }}"
    )


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial", "race"])
def test_calls_nest_and_return_early(mode):
    """A function that calls another, with a local array, an early return and names of its own."""
    body = AT + call("later", "%r0", "%r1") + call("square", "%r1", "%r2") + STORE.format("%r2")
    result, memory = launch(body, {"dst": 4 * THREADS}, shared=FUNCTIONS, mode=mode)
    assert result.ok, result.findings

    def square(x: int) -> int:
        return x * x + (0 if x < 8 else 1000)

    want = [square(square(i) + i) for i in range(THREADS)]
    assert memory.read("dst", np.uint32, (THREADS,)).tolist() == want


def test_a_guarded_call_runs_for_some_threads():
    """Threads whose guard is off go past the call."""
    body = AT + "mov.u32 %r1, 7; setp.lt.u32 %p1, %r0, 10;"
    body += "{ .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %r0; st.param.b32 [r0], %r1;"
    body += "@%p1 call (r0), square, (p0); ld.param.b32 %r1, [r0]; }" + STORE.format("%r1")
    result, memory = launch(body, {"dst": 4 * THREADS}, shared=FUNCTIONS)
    assert result.ok, result.findings
    want = [i * i + (i >= 8) * 1000 if i < 10 else 7 for i in range(THREADS)]
    assert memory.read("dst", np.uint32, (THREADS,)).tolist() == want


def test_printf_is_silent_and_a_failed_assertion_is_a_finding():
    """vprintf returns zero; __assertfail stops the run and names its thread."""
    body = AT + "{ .param .b64 p0; .param .b64 p1; .param .b32 r0; st.param.b64 [p0], 0; st.param.b64 [p1], 0;"
    body += "call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r1, [r0]; }" + STORE.format("%r1")
    result, memory = launch(body, {"dst": 4 * THREADS}, shared=FUNCTIONS)
    assert result.ok and not memory.read("dst", np.uint32, (THREADS,)).any()
    body = "mov.u32 %r0, %tid.x; setp.ne.u32 %p1, %r0, 40; @%p1 bra FINE;"
    body += "{ .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;"
    body += "call.uni __assertfail, (a, b, c, d, e); } FINE:"
    result, _ = launch(body, {}, shared=FUNCTIONS)
    assert kinds(result) == {"assertion"} and (result.findings[0].warp, result.findings[0].lane) == (1, 8)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{ .param .b32 x; call loop, (x); }", "too deeply"),
        ("{ .param .b32 x; call (x), nowhere, (x); }", "undeclared"),
        ("{ .param .b32 x; call (x), square; }", "takes 2 .param values"),
        ("call (%r1), square, (%r2);", "no .param variable"),
        ("brx.idx %r1, TABLE;", "declared before it"),
    ],
)
def test_calls_that_cannot_be_expanded_are_refused(body, message):
    """Recursion, unknown functions and wrong arguments raise PtxError."""
    with pytest.raises(PtxError, match=message):
        launch(body, {}, shared=FUNCTIONS)


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial"])
def test_indexed_branches_go_where_the_table_says(mode):
    """brx.idx takes each thread to its own target."""
    body = AT + "and.b32 %r1, %r0, 3; mov.u32 %r2, 0; TABLE: .branchtargets L0, L1, L2, L1; brx.idx %r1, TABLE;"
    body += "L0: mov.u32 %r2, 100; bra JOIN; L1: mov.u32 %r2, 200; bra JOIN; L2: mov.u32 %r2, 300; JOIN:"
    result, memory = launch(body + STORE.format("%r2"), {"dst": 4 * THREADS}, mode=mode)
    assert result.ok, result.findings
    assert memory.read("dst", np.uint32, (THREADS,)).tolist() == [[100, 200, 300, 200][i % 4] for i in range(THREADS)]


VARIABLES = """
.global .align 4 .u32 table[4] = {10, 0x14, 30};
.const .align 8 .f64 half = 0.5;
.const .f32 third[2] = {0f3F800000, 1.5};
.global .align 8 .u64 pointer = generic(table)+4;
.global .align 1 .b8 text[] = {72, 105, 0};
.global .align 4 .u32 counter;
"""


def test_module_variables_start_with_their_values_and_live_on():
    """.global and .const variables hold their initial values; writes stay for the next launch in the same memory."""
    body = AT + "and.b32 %r1, %r0, 3; mul.wide.u32 %d2, %r1, 4; mov.u64 %d3, table; add.s64 %d3, %d3, %d2;"
    body += "ld.global.u32 %r2, [%d3]; ld.const.f64 %d4, [half]; cvt.rzi.u32.f64 %r3, %d4; mul.f64 %d4, %d4, 4.0;"
    body += "cvt.rzi.u32.f64 %r3, %d4; add.u32 %r2, %r2, %r3; ld.global.u64 %d5, [pointer]; ld.u32 %r4, [%d5];"
    body += "add.u32 %r2, %r2, %r4; ld.const.f32 %r5, [third+4]; mul.f32 %r5, %r5, 2.0; cvt.rzi.u32.f32 %r5, %r5;"
    body += "add.u32 %r2, %r2, %r5; ld.global.u8 %r6, [text+1]; add.u32 %r2, %r2, %r6; red.global.add.u32 [counter], 1;"
    body += "bar.sync 0; ld.global.u32 %r7, [counter]; mad.lo.u32 %r2, %r7, 1000, %r2;" + STORE.format("%r2")
    text = (
        HEAD
        + VARIABLES
        + ".visible .entry k(.param .u64 dst)\n{\n.reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %d<9>;\n"
    )
    kernel = load(text + body.replace(";", ";\n") + "\nret;\n}\n").kernels["k"]
    memory = Memory(1)
    address = memory.poison("dst", 4 * THREADS)
    config = LaunchConfig(grid=(1, 1, 1), block=(THREADS, 1, 1), params=(address.to_bytes(8, "little"),))
    for turn in (1, 2):
        result = run(kernel, config, memory)
        assert result.ok, result.findings
        want = [[10, 20, 30, 0][i % 4] + 2 + 20 + 3 + 105 + 1000 * THREADS * turn for i in range(THREADS)]
        assert memory.read("dst", np.uint32, (THREADS,)).tolist() == want


def test_constants_cannot_be_written():
    """A store to a .const variable is a finding."""
    result, _ = launch("mov.u64 %d0, half; st.global.u64 [%d0], %d0;", {}, shared=VARIABLES)
    assert kinds(result) == {"write-to-read-only"}


def test_generic_addresses_of_different_spaces_in_one_instruction():
    """Lanes may load, store and update shared, local and global memory through one generic instruction."""
    shared = ".shared .align 16 .b8 smem[256];"
    body = AT + ".local .align 4 .b8 mine[8]; mov.u64 %d2, smem; cvta.shared.u64 %d2, %d2; add.s64 %d2, %d2, %d1;"
    body += "mov.u64 %d3, mine; cvta.local.u64 %d3, %d3; rem.u32 %r1, %r0, 3; setp.eq.u32 %p1, %r1, 0;"
    body += "setp.eq.u32 %p2, %r1, 1; selp.b64 %d4, %d2, %d3, %p2; selp.b64 %d4, %d0, %d4, %p1; mul.lo.u32 %r2, %r0, 5;"
    body += "st.u32 [%d4], %r2; atom.add.u32 %r3, [%d4], 2;" if False else "st.u32 [%d4], %r2;"
    body += "ld.u32 %r3, [%d4]; isspacep.shared %p3, %d4; isspacep.local %p4, %d4; selp.u32 %r4, 1000, 0, %p3;"
    body += "selp.u32 %r5, 2000, 0, %p4; add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r5;" + STORE.format("%r3")
    result, memory = launch(body, {"dst": 4 * THREADS}, shared=shared)
    assert result.ok, result.findings
    want = [5 * i + [0, 1000, 2000][i % 3] for i in range(THREADS)]
    assert memory.read("dst", np.uint32, (THREADS,)).tolist() == want


@pytest.mark.parametrize("form", ["acquire.gpu", "relaxed.sys", "volatile", "weak", "relaxed.cluster", "acquire.cta"])
def test_strong_loads_and_stores_move_data(form):
    """Orderings and scopes of ld and st change no value."""
    out = form.replace("acquire", "release")
    body = (
        AT
        + f"st.{out}.global.u32 [%d0], %r0; ld.{form}.global.u32 %r1, [%d0]; add.u32 %r1, %r1, 1;"
        + STORE.format("%r1")
    )
    result, memory = launch(body, {"dst": 4 * THREADS})
    assert result.ok and memory.read("dst", np.uint32, (THREADS,)).tolist() == list(range(1, THREADS + 1))


def test_clocks_go_up_and_policies_are_ignored():
    """%clock64 never goes back; cache policies, hints and sleeps change nothing."""
    body = AT + "mov.u64 %d2, %clock64; nanosleep.u32 20; bar.sync 0; mov.u64 %d3, %clock64; mov.u64 %d6, %globaltimer;"
    body += "createpolicy.fractional.L2::evict_first.b64 %d4, 1.0; prefetch.global.L2 [%d0]; setp.ge.u64 %p1, %d3, %d2;"
    body += "selp.u32 %r1, 1, 0, %p1; st.global.L1::no_allocate.L2::cache_hint.u32 [%d0], %r1, %d4;"
    body += "mov.u32 %r2, %clock; mov.u32 %r3, WARP_SZ;"
    result, memory = launch(body, {"dst": 4 * THREADS})
    assert result.ok and memory.read("dst", np.uint32, (THREADS,)).all()
