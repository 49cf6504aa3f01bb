"""Argument errors of triangle_multiplicative_update, and its shape queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime import ArgumentError
from runtime_fakes import FakeDriver, operands, small_manifest, trimul_cell, write_wheel

update = kf_runtime.triangle_multiplicative_update


@pytest.mark.parametrize(
    ("changes", "argument", "expected", "found"),
    [
        ({"direction": "sideways"}, "direction", "'outgoing' or 'incoming'", "'sideways'"),
        ({"precision": "float8"}, "precision", "'bfloat16'", "'float8'"),
        ({"precision": 3}, "precision", "TriMulPrecision", "3"),
        ({"eps": -1.0}, "eps", "at least 0", "-1.0"),
        ({"x": torch.zeros(8, 16)}, "x", "[*, N, N, C]", "[8, 16]"),
        ({"x": torch.zeros(1, 8, 7, 16)}, "x", "[*, N, N, C]", "[1, 8, 7, 16]"),
        ({"x": torch.zeros(1, 8, 8, 0)}, "x", "one channel", "[1, 8, 8, 0]"),
        ({"x": torch.zeros(1, 8, 8, 16, dtype=torch.int32)}, "x", "floating", "int32"),
        ({"x": [1.0]}, "x", "tensor", "list"),
        ({"mask": torch.zeros(8, 8)}, "mask", "[1, 8, 8]", "[8, 8]"),
        ({"mask": 1.0}, "mask", "tensor", "float"),
        ({"mask": torch.zeros(1, 8, 8, dtype=torch.complex64)}, "mask", "real", "complex64"),
        ({"mask": torch.zeros(1, 8, 8, device="meta")}, "mask", "cpu", "meta"),
        ({"p_in_weight": torch.zeros(33, 16).bfloat16()}, "p_in_weight", "[2D, C]", "[33, 16]"),
        ({"p_in_weight": torch.zeros(32).bfloat16()}, "p_in_weight", "2 dim", "[32]"),
        ({"g_in_weight": torch.zeros(16, 16).bfloat16()}, "g_in_weight", "[32, 16]", "[16, 16]"),
        ({"norm_in_weight": torch.zeros(15).bfloat16()}, "norm_in_weight", "[16]", "[15]"),
        ({"norm_out_bias": torch.zeros(15).bfloat16()}, "norm_out_bias", "[16]", "[15]"),
        ({"p_out_weight": torch.zeros(16, 15).bfloat16()}, "p_out_weight", "[16, 16]", "[16, 15]"),
        ({"g_out_bias": torch.zeros(1, 16).bfloat16()}, "g_out_bias", "[16]", "[1, 16]"),
        ({"g_out_weight": torch.zeros(16, 16).half()}, "g_out_weight", "torch.bfloat16", "torch.float16"),
        ({"g_out_weight": torch.zeros(16, 16)}, "g_out_weight", "as the parameters before it", "torch.float32"),
        ({"g_out_weight": torch.zeros(16, 16, device="meta").bfloat16()}, "g_out_weight", "cpu", "meta"),
        ({"x": torch.zeros(1, 8, 8, 16).bfloat16().to_sparse()}, "x", "dense", "sparse_coo"),
        ({"x": torch.nested.nested_tensor([torch.zeros(8, 8, 16).bfloat16()])}, "x", "dense", "nested"),
        ({"mask": torch.zeros(1, 8, 8).bfloat16().to_sparse()}, "mask", "dense", "sparse_coo"),
        ({"p_out_bias": "none"}, "p_out_bias", "tensor or None", "str"),
    ],
)
def test_errors_name_argument_expectation_and_value(
    changes: dict[str, Any],
    argument: str,
    expected: str,
    found: str,
    fake: FakeDriver,
    install: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Each bad argument is a ValueError that starts with its name and says what was expected and what came.

    So it is where the signature of the good call is ready to launch.
    """
    install(write_wheel(tmp_path / "data", small_manifest()))
    with torch.no_grad():
        update(**operands(trimul_cell()))
    with torch.no_grad(), pytest.raises(ArgumentError) as caught:
        update(**{**operands(trimul_cell()), **changes})
    text = str(caught.value)
    assert isinstance(caught.value, ValueError) and caught.value.argument == argument
    assert text.startswith(f"{argument}: expected")
    assert expected in text.split("; found ")[0] and found in text.split("; found ")[1]


def test_explain_checks_arguments_too() -> None:
    """explain refuses what the op refuses, and an op that is not ours by name."""
    with pytest.raises(ArgumentError, match="direction"):
        kf_runtime.explain("triangle_multiplicative_update", torch.zeros(1, 4, 4, 8), "sideways")
    with pytest.raises(ArgumentError, match=r"op_name.*'attention'"):
        kf_runtime.explain("attention")


def test_a_module_has_channels() -> None:
    """Widths of 0 are errors by name as the module is made."""
    for sizes, name in (((0,), "channels"), ((8, 0), "hidden")):
        with pytest.raises(ArgumentError, match=f"{name}: expected at least 1; found 0"):
            kf_runtime.TriangleMultiplicativeUpdate(*sizes)


def test_shape_queries_reject_shapes_that_are_no_pair() -> None:
    """The shape queries name the argument as well."""
    query = kf_runtime.triangle_multiplicative_update_inference_shape_is_supported
    for bad in ((8, 16), (1, 8, 7, 16), (1, 8.0, 8.0, 16), (1, "n", "n", 16)):
        with pytest.raises(ArgumentError, match="shape"):
            query(bad, 16)
    for width in (0, 16.0, None):
        with pytest.raises(ArgumentError, match="hidden_dim"):
            query((1, 8, 8, 16), width)
    with pytest.raises(ArgumentError, match="direction"):
        kf_runtime.prepare_triangle_multiplicative_update_training((1, 8, 8, 16), 16, "up")


def test_training_is_owned_by_the_generic_path() -> None:
    """Until there is a backward kernel, the training query says generic and why."""
    answer = kf_runtime.prepare_triangle_multiplicative_update_training((1, 8, 8, 16), 16)
    assert answer["owner"] == "generic" and "backward" in answer["reason"]
