"""The CuTe DSL side of trimul_mma: the host function of each kernel.

Every pointer is bf16 and aligned to 16 bytes; the scalars are N and B, in that order. Optional
operands are left out of a specialisation that does not use them; ``plan`` lists the order.
"""

from __future__ import annotations

from kernel_factory.families.trimul_mma import contract, finalize, project
from kernel_factory.family import HostEntry, KernelSpec

_ENTRIES = {"project": project.entry, "contract": contract.entry, "finalize": finalize.entry}


def host_entry(spec: KernelSpec) -> HostEntry:
    """The host function of ``spec``; KeyError for a kernel that this family does not have."""
    function, pointers = _ENTRIES[spec.kernel](spec)
    return HostEntry(function=function, pointer_dtypes=("bf16",) * pointers, scalars=2)
