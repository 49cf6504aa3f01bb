"""The names that integrations take, without any of the packages: a wrong one is an error, never silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kf_runtime import ArgumentError, integrations


@pytest.mark.parametrize("function", [integrations.install, integrations.uninstall])
@pytest.mark.parametrize("name", ["botlz", 3, ["boltz"], None])
def test_a_name_that_is_no_target(function: Any, name: Any) -> None:
    """A typo in uninstall would leave the patch in place; a list is not several names."""
    with pytest.raises(ArgumentError, match="packages: expected names among cuequivariance_torch, boltz"):
        function(name)


@pytest.mark.parametrize("layer", [None, torch.nn.LayerNorm, torch.nn.Linear(2, 2)])
def test_verify_of_what_was_not_patched(layer: Any) -> None:
    """A class, None or another layer is named."""
    with pytest.raises(ArgumentError, match="layer: expected a layer of a class that install"):
        integrations.verify(layer)
