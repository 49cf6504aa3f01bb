"""The integrations against the real packages: patched layers equal their own forward, odd ones keep it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import kf_runtime
import pytest
import torch
from kf_runtime import integrations

from tests.pytorch.conftest import Emulated

os.environ.setdefault("LAYERNORM_TYPE", "torch")  # Protenix builds a CUDA extension at import otherwise
pytestmark = pytest.mark.integrations
HOMES = {
    "boltz": "boltz.model.layers.triangular_mult",
    "openfold3": "openfold3.core.model.layers.triangular_multiplicative_update",
    "protenix": "protenix.model.triangular.triangular",
    "cuequivariance_torch": "cuequivariance_torch.primitives.triangle",
}


def home(package: str) -> Any:
    """The package's module, or a skip that says what is missing."""
    try:
        return importlib.import_module(HOMES[package])
    except ImportError as cause:
        pytest.skip(f"{package} is not importable here: {cause}; pip install --no-deps {package} and what it imports")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    integrations.uninstall()


def generic_calls() -> int:
    return sum(kf_runtime.status().generic.values())


LAYERS: dict[str, tuple[str, Callable[[Any], torch.nn.Module]]] = {
    "boltz_outgoing": ("boltz", lambda m: m.TriangleMultiplicationOutgoing(32)),
    "boltz_incoming": ("boltz", lambda m: m.TriangleMultiplicationIncoming(32)),
    "openfold3_outgoing": ("openfold3", lambda m: m.TriangleMultiplicationOutgoing(32, 32)),
    "openfold3_incoming_wide": ("openfold3", lambda m: m.TriangleMultiplicationIncoming(32, 48)),
    "openfold3_fused_outgoing": ("openfold3", lambda m: m.FusedTriangleMultiplicationOutgoing(32, 16)),
    "openfold3_fused_incoming": ("openfold3", lambda m: m.FusedTriangleMultiplicationIncoming(32, 32)),
    "openfold3_biases": ("openfold3", lambda m: with_biases(m.TriangleMultiplicationIncoming(32, 16))),
    "protenix_outgoing": ("protenix", lambda m: m.TriangleMultiplicationOutgoing(32, 48)),
    "protenix_incoming": ("protenix", lambda m: m.TriangleMultiplicationIncoming(32, 32)),
}


def with_biases(layer: torch.nn.Module) -> torch.nn.Module:
    """AF2's layer: every projection has a bias."""
    for name, child in list(layer.named_children()):
        if name.startswith("linear"):
            setattr(layer, name, type(child)(child.in_features, child.out_features, bias=True))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(LAYERS))
def test_patched_layers_equal_their_own_forward(name: str, dtype: torch.dtype) -> None:
    """Our op serves the layer and agrees with its own forward; the state dict is unchanged; a wrong way round shows."""
    package, make = LAYERS[name]
    module = home(package)
    layer = make(module)
    names = list(layer.state_dict())
    integrations.install(package)
    before = generic_calls()
    pair = torch.randn(2, 21, 21, 32).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32 and package == "boltz"):
        found = integrations.verify(layer, pair)
    assert found.served and found.ok, found
    assert generic_calls() == before + 1 and list(layer.state_dict()) == names
    if hasattr(layer, "_outgoing"):
        read = type(layer).forward.kf_read
        wrong = type(read(layer))(
            direction="incoming" if layer._outgoing else "outgoing", eps=1e-5, parameters=read(layer).parameters
        )
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        with torch.no_grad():
            from kf_runtime.integrations.layers import serve

            own = layer.float()(pair.float())
            other = serve(wrong, pair.float(), None, cast=True)
        assert float((own - other).norm() / own.norm()) > 1e-2


@pytest.mark.parametrize("name", ["boltz_incoming", "openfold3_fused_outgoing", "protenix_outgoing"])
def test_masks_that_broadcast(name: str) -> None:
    """A mask of one batch, of lower rank, or of one column serves every batch, as in the package's own product."""
    package, make = LAYERS[name]
    module = home(package)
    layer = make(module)
    integrations.install(package)
    pair = torch.randn(3, 9, 9, 32)
    full = (torch.rand(1, 9, 9) > 0.2).to(pair)
    for mask in (full, full[0], full[:, :, :1]):
        found = integrations.verify(layer, pair, mask)
        assert found.served and found.ok, (mask.shape, found)


def test_another_autocast_joins_the_halves() -> None:
    """A BF16 layer with split projections under float16 autocast, which refuses to concatenate BF16, is served."""
    module = home("openfold3")
    integrations.install("openfold3")
    with torch.autocast("cpu", dtype=torch.float16):
        found = integrations.verify(module.TriangleMultiplicationOutgoing(32, 32).bfloat16())
    assert found.served and found.ok, found


def test_a_mask_that_does_not_fit_is_named() -> None:
    """What the package cannot broadcast either stays an error that names the mask."""
    module = home("boltz")
    integrations.install("boltz")
    layer, pair = module.TriangleMultiplicationIncoming(8), torch.randn(2, 5, 5, 8)
    for shape in ((3, 5, 5), (5, 4), (1, 2, 5, 5)):
        with pytest.raises(ValueError, match="mask: expected shape"):
            layer(pair, torch.ones(shape))


def test_gradients_of_a_patched_layer() -> None:
    """Training through a patched layer gives the gradients of its own forward."""
    module = home("openfold3")
    layer = module.TriangleMultiplicationOutgoing(16, 16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pair, mask = torch.randn(1, 9, 9, 16), torch.ones(1, 9, 9)
    layer(pair, mask).square().sum().backward()
    own = {n: p.grad.clone() for n, p in layer.named_parameters()}
    integrations.install("openfold3")
    layer.zero_grad()
    layer(pair, mask).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name], rtol=1e-3, atol=1e-3)
        assert own[name].norm() > 0


def test_in_place_addition() -> None:
    """inplace_safe with _add_with_inplace: the pair itself holds pair + update, as in the package."""
    module = home("openfold3")
    layer = module.TriangleMultiplicationIncoming(16, 16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pair, mask = torch.randn(1, 8, 8, 16), torch.ones(1, 8, 8)
    with torch.no_grad():
        own = layer(pair.clone(), mask, inplace_safe=True, _add_with_inplace=True)
        integrations.install("openfold3")
        mine = pair.clone()
        answer = layer(mine, mask, inplace_safe=True, _add_with_inplace=True)
    assert answer.data_ptr() == mine.data_ptr() and (own - pair).norm() > 0
    torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-4)


def odd_layers(module: Any) -> dict[str, torch.nn.Module]:
    """Layers that look like the package's and compute something else."""

    class Swapped(module.TriangleMultiplicationIncoming):  # type: ignore[name-defined,misc]
        def _combine_projections(self, a: Any, b: Any, _inplace_chunk_size: Any = None) -> Any:
            return super()._combine_projections(b, a, _inplace_chunk_size)

    class Interleaved(module.FusedTriangleMultiplicationOutgoing):  # type: ignore[name-defined,misc]
        def _combine_projections(self, a: Any, b: Any, _inplace_chunk_size: Any = None) -> Any:
            both = torch.cat((a, b), -1)
            return super()._combine_projections(both[..., ::2], both[..., 1::2], _inplace_chunk_size)

    class Scaled(type(module.TriangleMultiplicationOutgoing(16, 16).linear_g)):  # type: ignore[misc]
        def forward(self, input: Any) -> Any:
            return 2 * super().forward(input)

    hooked, eps, precise, lora, half = (module.TriangleMultiplicationOutgoing(16, 16) for _ in range(5))
    hooked.linear_z.register_forward_hook(lambda m, a, out: out * 3)
    eps.layer_norm_out.eps = 1e-2
    precise.linear_z.precision = torch.float64
    lora.linear_g = Scaled(16, 16, bias=False)
    half.linear_a_p = type(half.linear_a_p)(16, 16, bias=True)
    return {
        "swapped": Swapped(16, 16), "interleaved": Interleaved(16, 16), "hooked": hooked, "eps": eps,
        "precise": precise, "lora": lora, "half_biased": half,
    }  # fmt: skip


def test_odd_layers_keep_their_own_forward() -> None:
    """Swapped incoming, interleaved channels, hooks, two eps, subclassed projections: declined with the reason."""
    module = home("openfold3")
    layers = odd_layers(module)
    integrations.install("openfold3")
    for name, layer in layers.items():
        found = integrations.verify(layer)
        assert not found.served and found.error == 0 and found.norm > 0 and found.reason, (name, found)


def test_cuequivariance_gets_our_op_in_both_modules() -> None:
    """Without its own kernels the package's function raises; installed, both names are ours; uninstall restores."""
    triangle = home("cuequivariance_torch")
    import cuequivariance_torch

    original = triangle.triangle_multiplicative_update
    x = torch.randn(1, 6, 6, 32)
    assert integrations.install("cuequivariance_torch") == ("cuequivariance_torch",)
    assert cuequivariance_torch.triangle_multiplicative_update is triangle.triangle_multiplicative_update
    out = triangle.triangle_multiplicative_update(x, precision=triangle.TriMulPrecision.IEEE)
    assert out.shape == x.shape and out.norm() > 0
    integrations.install("cuequivariance_torch")
    assert integrations.uninstall() == ("cuequivariance_torch",)
    assert cuequivariance_torch.triangle_multiplicative_update is original
    assert triangle.triangle_multiplicative_update is original


def test_a_declined_call_goes_on_to_the_incumbent() -> None:
    """Chained, the incumbent answers what KF declines, with the very arguments; errors of arguments stay ours."""
    from kf_runtime.integrations.cuequivariance import chained

    seen: list[Any] = []
    call = chained(lambda *args, **kwargs: seen.append((args, kwargs)) or "incumbent")
    x = torch.randn(1, 4, 4, 8)
    assert call(x, "incoming", eps=1e-3) == "incumbent"
    assert seen[0][0][0] is x and seen[0][0][1] == "incoming" and seen[0][1] == {"eps": 1e-3}
    with pytest.raises(ValueError, match="direction"):
        call(x, "sideways")


def test_names_that_are_no_target() -> None:
    """An unknown package is an error that lists the known ones; verify refuses a layer that is not patched."""
    with pytest.raises(ValueError, match="boltz"):
        integrations.install("numpy")
    with pytest.raises(ValueError, match="patched"):
        integrations.verify(torch.nn.Linear(2, 2))


def test_patched_models_run_kernels(emulated: Emulated) -> None:
    """On the emulated driver, layers of the three packages at an admitted cell run KF and agree with their own."""
    for package in ("boltz", "openfold3", "protenix"):
        home(package)
    found = emulated(
        """
        from kf_runtime import integrations
        driver = start()
        integrations.install("boltz", "openfold3", "protenix")
        from boltz.model.layers import triangular_mult as boltz
        from openfold3.core.model.layers import triangular_multiplicative_update as openfold3
        from protenix.model.triangular import triangular as protenix
        pair = torch.randn(1, 64, 64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
        rows = {}
        for name, layer in (("boltz", boltz.TriangleMultiplicationIncoming(64).bfloat16()),
                            ("openfold3", openfold3.TriangleMultiplicationIncoming(64, 64)),
                            ("protenix", protenix.TriangleMultiplicationIncoming(64, 64))):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "boltz"):
                one = integrations.verify(layer, pair)
            rows[name] = (one.ok, one.kernels, one.error, one.norm)
        answer(rows=rows, launches=driver.launches)
        """
    )
    assert found["launches"] == 9
    assert all(ok and kernels == 1 for ok, kernels, _, _ in found["rows"].values()), found["rows"]
