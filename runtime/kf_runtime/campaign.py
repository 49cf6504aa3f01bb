"""Campaign: the mode in which KF runs. The only place of this package that reads the environment.

``CUEQ_TRIMUL_KF_CAMPAIGN``, read once at import, case-insensitive:

- unset, auto, 1, true, on, yes: KF runs where it is admitted on this product
- 0, false, off, no: KF disabled; no driver call, no cubin read
- force: for tests; every eligible call must run KF, or it raises
- preview: ``auto``, plus cells of this SM that were proved on the emulator alone
- anything else: one warning, then auto

``KF_JIT``, read beside it: families, by comma, that answer in their JIT form (see ``kf_runtime.jit``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

VARIABLE: Final = "CUEQ_TRIMUL_KF_CAMPAIGN"
JIT_VARIABLE: Final = "KF_JIT"


class Mode(Enum):
    """See the table at the top of this module."""

    AUTO = "auto"
    OFF = "off"
    FORCE = "force"
    PREVIEW = "preview"


_SPELLINGS: Final = {
    **dict.fromkeys(("", "auto", "1", "true", "on", "yes"), Mode.AUTO),
    **dict.fromkeys(("0", "false", "off", "no"), Mode.OFF),
    "force": Mode.FORCE,
    "preview": Mode.PREVIEW,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment says. ``jit`` is the text of KF_JIT: families that answer in their JIT form, by comma."""

    mode: Mode = Mode.AUTO
    jit: str = ""


def parse_mode(text: str) -> Mode | None:
    """The mode that ``text`` spells, or None."""
    return _SPELLINGS.get(text.strip().lower())


def read_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. An unknown mode is one warning, then auto."""
    variables = os.environ if environment is None else environment
    text = variables.get(VARIABLE, "")
    mode = parse_mode(text)
    if mode is None:
        warnings.warn(
            f"{VARIABLE}: expected auto, off, force or preview; found {text!r}; continuing with auto",
            RuntimeWarning,
            stacklevel=2,
        )
    return Settings(mode=mode or Mode.AUTO, jit=variables.get(JIT_VARIABLE, ""))


SETTINGS: Final = read_environment()
