"""Tensor maps edited on the device: tensormap.replace and tensormap.cp_fenceproxy.

PTX ISA 9.7.9.26 (tensormap.replace) and 9.7.13.14 (tensormap.cp_fenceproxy). A map under construction lies in shared
or global memory; copies read it from global memory or a parameter. Positions of the fields: ``tensor_map``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..ptx.records import Immediate, Instruction
from ..registry import emits, runtime
from .tma import own_flat

# Field: (word, lowest bit, bits, subtract, divide) for each ordinal; sizes are stored less one, strides over 16.
_FIELDS = {
    "global_address": [(0, 0, 64, 0, 1)],
    "rank": [(1, 4, 3, 0, 1)],
    "elemtype": [(1, 7, 4, 0, 1)],
    "interleave_layout": [(1, 11, 2, 0, 1)],
    "swizzle_mode": [(1, 13, 2, 0, 1)],
    "fill_mode": [(1, 15, 1, 0, 1)],
    "swizzle_atomicity": [(1, 19, 2, 0, 1)],
    "global_stride": [(1, 32, 32, 0, 16), (2, 0, 32, 0, 16), (2, 32, 32, 0, 16), (3, 0, 32, 0, 16)],
    "global_dim": [(4, 0, 32, 1, 1), (4, 32, 32, 1, 1), (5, 0, 32, 1, 1), (5, 32, 32, 1, 1), (6, 0, 32, 1, 1)],
    "box_dim": [(6, 56, 8, 1, 1), (7, 0, 8, 1, 1), (7, 8, 8, 1, 1), (7, 16, 8, 1, 1), (7, 24, 8, 1, 1)],
}
_TF32 = {11: (7, 1), 12: (7, 1)}


@emits("tensormap.replace.tile", writes=False)
def replace(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tensormap.replace.tile.field{.ss}.b1024.type [addr], {ord,} new_val."""
    wide = mods.type("b32", "b64") == "b64"
    mods.one("b1024")
    field = mods.one(*_FIELDS, "element_stride")
    space = mods.take("global", "shared::cta")
    if space is None:
        raise e.fail("tensormap.replace is emulated with a named state space, .global or .shared::cta")
    target, *rest = ins.operands
    ordinal = rest.pop(0) if len(rest) == 2 else Immediate(0)
    if len(rest) != 1 or not isinstance(ordinal, Immediate):
        raise e.fail("expected [address], {ordinal,} value")
    if field == "element_stride":
        raise e.fail("element strides other than 1 are not emulated")
    places = _FIELDS[field]
    if not 0 <= ordinal.value < len(places):
        raise e.fail(f"{field} has ordinals 0 to {len(places) - 1}")
    place = e.shared_place(target) if space == "shared::cta" else e.global_place(target)
    what = e.static(Edit(shared=space == "shared::cta", place=places[ordinal.value], element=field == "elemtype"))
    e.line(f"tensormap_replace({e.issue()}, {place}, {what}, {e.value(rest[0], 'u64' if wide else 'u32')})")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Which field of a map (``_FIELDS``) is replaced, and whether the map lies in shared memory."""

    shared: bool
    place: tuple[int, int, int, int, int]
    element: bool


def _words(issue: Issue, place: tuple, shared: bool) -> Iterator[np.ndarray]:
    """A view of the eight words of each thread's map."""
    M = issue.M
    if shared:
        for i, flat in enumerate(own_flat(issue, place).tolist()):
            if flat % 8 or flat % M.shared_stride + 128 > M.shared_end - M.shared_origin:
                raise issue.fault("misaligned", "tensor map in shared memory", "align its 128 bytes to 128", i)
            yield M.shared_bytes[flat : flat + 64].view(np.uint64)
        return
    (address, *_), offset = place
    for i, at in enumerate((issue.each(address) + offset).tolist()):
        buffer = M.memory.find(at, at + 128)
        if buffer is None or not buffer.writable or at % 64:
            raise issue.fault("bad-tensor-map", f"no writable tensor map lies at {M.memory.describe(at)}",
                              "keep the map in a buffer of its own, aligned to 128 bytes", i)  # fmt: skip
        yield buffer.data[at - buffer.address :][:64].view(np.uint64)


@runtime
def tensormap_replace(issue: Issue, place: tuple, what: Edit, value: np.ndarray) -> None:
    word, low, bits, less, unit = what.place
    values = issue.each(value).tolist()
    for i, words in enumerate(_words(issue, place, what.shared)):
        new, rounds = values[i], 0
        if new % unit:
            raise issue.fault("bad-tensor-map", f"a stride of {new} bytes", "use multiples of 16 bytes", i)
        if what.element:
            new, rounds = _TF32.get(new, (new, 0))
            words[1] = np.uint64(int(words[1]) & ~(1 << 16) | rounds << 16)
        field = ((1 << bits) - 1) << low
        words[word] = np.uint64(int(words[word]) & ~field | ((new - less) // unit << low) & field)
    issue.M.changed()


@emits("tensormap.cp_fenceproxy", writes=False, collective=32)
def copy_and_fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tensormap.cp_fenceproxy: copy a map from shared to global memory, and fence it for later copies."""
    for name in ("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"):
        mods.one(name)
    mods.take("cta", "cluster", "gpu", "sys")
    target, source, size = e.operands(3)
    if not isinstance(size, Immediate) or size.value != 128 or ins.guard:
        raise e.fail("tensormap.cp_fenceproxy copies 128 bytes, unguarded")
    e.line(f"tensormap_copy({e.issue()}, {e.global_place(target)}, {e.shared_place(source)})")


@runtime
def tensormap_copy(issue: Issue, target: tuple, source: tuple) -> None:
    first = issue.narrowed(np.flatnonzero(np.arange(issue.n) % 32 == 0))
    for to, words in zip(_words(first, target, False), _words(first, source, True), strict=True):
        to[:] = words
    issue.M.changed()
