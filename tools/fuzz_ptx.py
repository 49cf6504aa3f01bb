"""Mangled PTX against the parser and the code generator: only a PtxError, or success, is right.

    python tools/fuzz_ptx.py [--seconds 600] [--seed 0] [file.ptx …]

Takes the given files (by default the PTX of tests/emulator/kernels and a few lines made here) and deletes, doubles,
swaps and replaces words, cuts the text, writes random bytes, and nests brackets deeply. Prints how often each outcome
came up; any other exception, or one text that takes more than 20 seconds, is printed with its seed and is a failure.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from kernel_factory.emulator import PtxError, module

TOO_LONG = 20  # seconds for one text
_WORDS = re.compile(r"[\w.%$:]+|\s+|.", re.S)
SEED_TEXT = """.version 9.3
.target sm_90a
.address_size 64
.global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
.func (.param .b32 r) twice(.param .b32 a) { .reg .b32 %r<3>; ld.param.b32 %r1, [a]; add.s32 %r2, %r1, %r1;
 st.param.b32 [r], %r2; ret; }
.visible .entry k(.param .u64 p, .param .u32 n) .reqntid 64, 1, 1
{ .reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %rd<8>; .shared .align 16 .b8 s[256]; .local .b8 l[16];
 ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; setp.lt.and.s32 %p1|%p2, %r1, 32, %p3; @%p1 bra L1;
 { .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; call.uni (y), twice, (x); ld.param.b32 %r2, [y]; }
L1: mul.wide.u32 %rd2, %r1, 16; add.s64 %rd3, %rd1, %rd2; ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd3+16];
 atom.global.add.u32 %r7, [%rd3], 1; red.shared.add.u32 [s+4], %r1; add.cc.u32 %r8, %r1, %r2; addc.u32 %r9, %r3, 0;
 shfl.sync.bfly.b32 %r10|%p1, %r9, 1, 31, -1; cvt.rn.bf16x2.f32 %r11, %r3, %r4; fma.rn.f32 %r12, %r3, 0f3F800000, %r4;
 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r3,%r4,%r5,%r6},{%r7,%r8,%r9,%r10},{%r11,%r12},{%r3,%r4,%r5,%r6};
 bar.sync 0; mbarrier.init.shared.b64 [s], 1; st.global.v2.b32 [%rd3], {%r11, %r12}; ret; }
"""


def corpus(paths: list[Path]) -> list[str]:
    """Texts to mangle, the shorter ones first."""
    folder = Path(__file__).parent.parent / "tests" / "emulator" / "kernels"
    paths = paths or sorted(folder.glob("*.ptx*"))
    texts = [SEED_TEXT]
    for path in paths:
        raw = path.read_bytes()
        texts.append((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode())
    return sorted(texts, key=len)


def mangle(text: str, draw: random.Random) -> str:
    """One to four random changes of a text."""
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(CHANGES)(text, draw)
    return text


def _words(text: str, draw: random.Random, change) -> str:
    start = draw.randrange(max(1, len(text)))
    window = text[start : start + 4000]
    words = _WORDS.findall(window)
    if len(words) > 3:
        change(words)
    return text[:start] + "".join(words) + text[start + 4000 :]


def delete(text: str, draw: random.Random) -> str:
    def change(words: list[str]) -> None:
        at = draw.randrange(len(words))
        del words[at : at + draw.choice((1, 1, 2, 5))]

    return _words(text, draw, change)


def double(text: str, draw: random.Random) -> str:
    def change(words: list[str]) -> None:
        at = draw.randrange(len(words))
        words[at:at] = words[at : at + draw.choice((1, 3, 10))] * draw.choice((1, 1, 2, 30))

    return _words(text, draw, change)


def swap(text: str, draw: random.Random) -> str:
    def change(words: list[str]) -> None:
        a, b = draw.randrange(len(words)), draw.randrange(len(words))
        words[a], words[b] = words[b], words[a]

    return _words(text, draw, change)


def replace(text: str, draw: random.Random) -> str:
    odd = (
        *"{}[]();,|!@_0\"\0é", "-1", "0x", "0f", "9" * 20, ".b32", ".b8", ".f64", ".v4", "%r1", "%rd1", "%p1", "%tid.x",
        "%clock", ".cc", ".sat", ".rz", "-0x8000000000000000", "1e400", "nan", ".shared", ".global", "%q9", "call",
        "1.5", "brx.idx", "ret", ".reg", ".param", "/*", "//",
    )  # fmt: skip

    def change(words: list[str]) -> None:
        words[draw.randrange(len(words))] = draw.choice(odd)

    return _words(text, draw, change)


def number(text: str, draw: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    match = draw.choice(found)
    value = draw.choice(("0", "1", "7", "31", "4294967296", "18446744073709551616", "1" * 40, "08"))
    return text[: match.start()] + value + text[match.end() :]


def cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text) + 1)]


def noise(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    junk = "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(256)))) for _ in range(draw.randint(1, 40)))
    return text[:at] + junk + text[at + draw.choice((0, len(junk))) :]


def nest(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    mark = draw.choice(("{", "[", "(", "{{", "@!", "|", "a|", "/*", "{}", "{ .reg .b32 %r1;", "L: "))
    return text[:at] + mark * draw.choice((3, 50, 3000)) + text[at:]


CHANGES = (delete, delete, double, swap, swap, replace, replace, replace, number, number, cut, noise, nest)


def attempt(text: str) -> str:
    """The outcome of one text: "loads" or "refused"; anything else is raised."""
    module._cache.clear()
    try:
        module.load(text)
    except PtxError:
        return "refused"
    return "loads"


class _TooLong(BaseException):
    pass


def _alarm(*_: object) -> None:
    raise _TooLong


def fuzz(texts: list[str], seconds: float, seed: int, most: int = 10**9) -> tuple[Counter, list[str]]:
    """Counts of outcomes, and a description of every failure."""
    counts, failures = Counter(), []
    signal.signal(signal.SIGALRM, _alarm)
    until = time.monotonic() + seconds
    trial = 0
    while time.monotonic() < until and trial < most:
        draw = random.Random(f"{seed} {trial}")
        text = mangle(texts[min(int(draw.expovariate(1)), len(texts) - 1)], draw)
        signal.alarm(TOO_LONG)
        try:
            counts[attempt(text)] += 1
        except _TooLong:
            counts["hangs"] += 1
            failures.append(f"trial {seed} {trial}: more than {TOO_LONG} s")
        except Exception as error:
            counts[type(error).__name__] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(f"trial {seed} {trial}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        finally:
            signal.alarm(0)
        trial += 1
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, failures = fuzz(corpus(options.files), options.seconds, options.seed)
    for failure in failures[:20]:
        print(failure)
    print(f"{sum(counts.values())} texts: " + ", ".join(f"{n} {name}" for name, n in counts.most_common()))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
