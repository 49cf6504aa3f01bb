"""PTX text to flat statement lists, one a kernel."""

from .modules import parse
from .records import (
    Address,
    Immediate,
    Instruction,
    KernelText,
    Label,
    ModuleText,
    Param,
    Register,
    Special,
    Symbol,
    Vector,
)

__all__ = [
    "Address",
    "Immediate",
    "Instruction",
    "KernelText",
    "Label",
    "ModuleText",
    "Param",
    "Register",
    "Special",
    "Symbol",
    "Vector",
    "parse",
]
