"""Our ops under other packages: ``install``, ``uninstall`` and ``verify``.

Patched are functions and ``forward`` methods of classes; no parameter is renamed, moved or copied,
so checkpoints load as before. What is patched is imported inside functions, and only where it is installed.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from kf_runtime.errors import ArgumentError
from kf_runtime.integrations import cuequivariance, models, verification
from kf_runtime.integrations.patching import Patches
from kf_runtime.integrations.verification import Verification as Verification

#: Package to the function that patches it.
TARGETS: Final = {
    "cuequivariance_torch": cuequivariance.patch,
    "boltz": models.patch_boltz,
    "openfold3": models.patch_openfold3,
    "protenix": models.patch_protenix,
}
_installed: Final[dict[str, Patches]] = {}


def install(*packages: str) -> tuple[str, ...]:
    """Put our op under the packages named, or under every one that is installed; the names patched, in order.

    A second call changes nothing. Raises ArgumentError for a name that is no target, ImportError for a
    named package that cannot be imported.
    """
    _check(packages)
    wanted = packages or tuple(name for name in TARGETS if importlib.util.find_spec(name) is not None)
    for name in wanted:
        if name not in _installed:
            patches = Patches()
            TARGETS[name](patches)
            _installed[name] = patches
    return tuple(wanted)


def uninstall(*packages: str) -> tuple[str, ...]:
    """Restore what ``install`` replaced, for the packages named or all; the names restored.

    Raises ArgumentError for a name that is no target.
    """
    _check(packages)
    wanted = tuple(name for name in packages or tuple(_installed) if name in _installed)
    for name in wanted:
        _installed.pop(name).restore()
    return wanted


def _check(packages: tuple[object, ...]) -> None:
    unknown = [str(name) for name in packages if not isinstance(name, str) or name not in TARGETS]
    if unknown:
        raise ArgumentError("packages", expected=f"names among {', '.join(TARGETS)}", found=", ".join(unknown))


verify = verification.verify
