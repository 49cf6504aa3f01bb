"""TriangleMultiplicativeUpdate: the op as a module, with the parameter names that models of the field use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kf_runtime.cell import DIRECTIONS
from kf_runtime.errors import ArgumentError
from kf_runtime.ops.triangle_multiplicative_update import triangle_multiplicative_update
from kf_runtime.ops.trimul_arguments import Precision, lecun_truncated_normal


class TriangleMultiplicativeUpdate(nn.Module):
    """The update with its own parameters: norm_in, p_in, g_in, norm_out, p_out, g_out.

    Args:
        channels: pair width C.
        hidden: hidden width D; None: C.
        direction: "outgoing" or "incoming".
        bias: whether the four projections carry a bias.
        eps: of both LayerNorms.
        precision: as in ``triangle_multiplicative_update``.

    Initialised as in the field: p_in LeCun normal; gates closed to one half (zero weights, biases one);
    p_out zero, so that the residual stream starts unchanged.
    """

    def __init__(
        self,
        channels: int,
        hidden: int | None = None,
        direction: str = "outgoing",
        *,
        bias: bool = False,
        eps: float = 1e-5,
        precision: Precision = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if direction not in DIRECTIONS:
            raise ArgumentError("direction", expected="'outgoing' or 'incoming'", found=repr(direction))
        width = channels if hidden is None else hidden
        for name, size in (("channels", channels), ("hidden", width)):
            if size < 1:
                raise ArgumentError(name, expected="at least 1", found=size)
        self.direction, self.eps, self.precision = direction, eps, precision
        self.norm_in = nn.LayerNorm(channels, eps=eps, device=device, dtype=dtype)
        self.p_in = nn.Linear(channels, 2 * width, bias=bias, device=device, dtype=dtype)
        self.g_in = nn.Linear(channels, 2 * width, bias=bias, device=device, dtype=dtype)
        self.norm_out = nn.LayerNorm(width, eps=eps, device=device, dtype=dtype)
        self.p_out = nn.Linear(width, channels, bias=bias, device=device, dtype=dtype)
        self.g_out = nn.Linear(channels, channels, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter anew."""
        weight = self.p_in.weight
        shape = (weight.shape[0], weight.shape[1])
        weight.copy_(lecun_truncated_normal(shape, dtype=weight.dtype, device=weight.device))
        for linear, bias in ((self.p_in, 0.0), (self.g_in, 1.0), (self.p_out, 0.0), (self.g_out, 1.0)):
            if linear is not self.p_in:
                linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.fill_(bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x [*, N, N, C]`` and ``mask [*, N, N]`` to the update ``[*, N, N, C]``; the caller adds the residual."""
        return triangle_multiplicative_update(
            x,
            self.direction,
            mask,
            self.norm_in.weight,
            self.norm_in.bias,
            self.p_in.weight,
            self.p_in.bias,
            self.g_in.weight,
            self.g_in.bias,
            self.norm_out.weight,
            self.norm_out.bias,
            self.p_out.weight,
            self.p_out.bias,
            self.g_out.weight,
            self.g_out.bias,
            self.eps,
            self.precision,
        )

    def extra_repr(self) -> str:
        """The options that the sub-modules do not show."""
        return f"direction={self.direction!r}, eps={self.eps}, precision={self.precision!r}"
