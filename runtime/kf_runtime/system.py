"""System: what we run on, as a value. Standard library only; ``driver.detect`` fills it in.

THE ONE SEAM that lets host tensors count as device memory is ``host_is_device`` below. It is
true for a product whose name starts with ``KF Emulated `` and for nothing else; only the
factory's emulated driver answers so. No switch and no environment variable sets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EMULATED_PREFIX: Final = "KF Emulated "
_SUFFIXED: Final = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}


@dataclass(frozen=True, kw_only=True)
class System:
    """One device. ``driver_version`` is a CUDA version: 13000 is 13.0."""

    product: str
    capability: tuple[int, int]
    driver_version: int
    ordinal: int

    @property
    def sm(self) -> str:
        """The SM as cells spell it: ``sm_90a`` for compute capability 9.0."""
        return sm_of(self.capability)

    @property
    def host_is_device(self) -> bool:
        """The seam: whether host tensors are this device's memory."""
        return self.product.startswith(EMULATED_PREFIX)

    @property
    def memory_kind(self) -> str:
        """``host`` on the emulated driver, ``device`` elsewhere."""
        return "host" if self.host_is_device else "device"


def sm_of(capability: tuple[int, int]) -> str:
    """The SM of a compute capability: the arch-specific name where cells use one, else ``sm_<major><minor>``."""
    return _SUFFIXED.get(capability, f"sm_{capability[0]}{capability[1]}")
