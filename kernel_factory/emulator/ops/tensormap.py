"""Tensor maps edited on the device: tensormap.replace and tensormap.cp_fenceproxy.

PTX ISA 9.7.9.26 (tensormap.replace) and 9.7.13.14 (tensormap.cp_fenceproxy). A map under construction lies in shared
or global memory; copies read it from global memory or a parameter. Positions of the fields: ``tensor_map``.
"""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import settle, spread, threads_of
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
    base, offset = e.shared_address(target) if space == "shared::cta" else e.global_address(target)
    value = e.value(rest[0], "u64" if wide else "u32")
    e.line(
        f"tensormap_replace(M, sel, {space == 'shared::cta'}, {base}, {offset}, {places[ordinal.value]}, "
        f"{field == 'elemtype'}, {value}, {e.guard()}, {ins.line}, n)"
    )


def _words(M, shared, sel, base, offset, chosen, line, n):
    """A view of the eight words of each thread's map, and the thread."""
    threads = threads_of(M, sel, chosen)
    if shared:
        for flat, thread in zip(
            own_flat(M, sel, base, offset, chosen, line, n).tolist(), threads.tolist(), strict=True
        ):
            if flat % 8 or flat % M.shared_stride + 128 > M.shared_end - M.shared_origin:
                raise Fault("misaligned", line, "tensor map in shared memory", "align its 128 bytes to 128", thread)
            yield M.shared_bytes[flat : flat + 64].view(np.uint64), thread
        return
    address = spread(base[0], n) + offset
    address = address if chosen is None else address[chosen]
    for at, thread in zip(address.tolist(), threads.tolist(), strict=True):
        buffer = M.memory.find(at, at + 128)
        if buffer is None or not buffer.writable or at % 64:
            raise Fault("bad-tensor-map", line, f"no writable tensor map lies at {M.memory.describe(at)}",
                        "keep the map in a buffer of its own, aligned to 128 bytes", thread)  # fmt: skip
        yield buffer.data[at - buffer.address :][:64].view(np.uint64), thread


@runtime
def tensormap_replace(M, sel, shared, base, offset, place, element, value, mask, line, n):
    chosen = settle(mask)
    values = spread(value, n)
    values = values if chosen is None else values[chosen]
    word, low, bits, less, unit = place
    for i, (words, thread) in enumerate(_words(M, shared, sel, base, offset, chosen, line, n)):
        new = int(values[i])
        if new % unit:
            raise Fault("bad-tensor-map", line, f"a stride of {new} bytes", "use multiples of 16 bytes", thread)
        rounds = 0
        if element:
            new, rounds = _TF32.get(new, (new, 0))
            words[1] = np.uint64(int(words[1]) & ~(1 << 16) | rounds << 16)
        field = ((1 << bits) - 1) << low
        words[word] = np.uint64(int(words[word]) & ~field | ((new - less) // unit << low) & field)
    M.changed()


@emits("tensormap.cp_fenceproxy", writes=False, collective=32)
def copy_and_fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tensormap.cp_fenceproxy: copy a map from shared to global memory, and fence it for later copies."""
    for name in ("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"):
        mods.one(name)
    mods.take("cta", "cluster", "gpu", "sys")
    target, source, size = e.operands(3)
    if not isinstance(size, Immediate) or size.value != 128 or ins.guard:
        raise e.fail("tensormap.cp_fenceproxy copies 128 bytes, unguarded")
    place, place_offset = e.global_address(target)
    base, offset = e.shared_address(source)
    e.line(f"tensormap_copy(M, sel, {place}, {place_offset}, {base}, {offset}, {ins.line}, n)")


@runtime
def tensormap_copy(M, sel, place, place_offset, base, offset, line, n):
    first = np.flatnonzero(np.arange(n) % 32 == 0)
    sources = _words(M, True, sel, base, offset, first, line, n)
    targets = _words(M, False, sel, place, place_offset, first, line, n)
    for (target, _), (source, _) in zip(targets, sources, strict=True):
        target[:] = source
    M.changed()
