"""Cases of liger-kernel's Triton kernels, compiled for three SMs, against float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from liger_kernel.ops import cross_entropy as ce
from liger_kernel.ops import geglu, kl_div, layer_norm, poly_norm, relu_squared, rms_norm, rope, softmax, swiglu, tvd

from .cases import Case, Expected, Launch, bf16, from_bf16
from .triton_cases import _launch

SMS = (80, 90, 120)


def _x(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _near(x: np.ndarray, rtol: float = 1e-5, atol: float = 1e-6) -> Expected:
    return Expected(values=np.ascontiguousarray(x, np.float32), rtol=rtol, atol=atol)


def rms_norm_f32(sm: int) -> Launch:
    x, w = _x(0, 4, 600), _x(1, 600)
    v = x.astype(np.float64)
    rstd = 1 / np.sqrt((v**2).mean(1) + 1e-6)
    values = {
        "Y_ptr": np.zeros_like(x), "Y_row_stride": 600, "X_ptr": x, "X_row_stride": 600, "W_ptr": w, "W_row_stride": 1,
        "RSTD_ptr": np.zeros(4, np.float32), "RSTD_row_stride": 1, "n_cols": 600, "eps": 1e-6, "offset": 0.0,
        "casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 1024,
    }  # fmt: skip
    expected = {"Y_ptr": _near(v * rstd[:, None] * w), "RSTD_ptr": _near(rstd)}
    return _launch(rms_norm._rms_norm_forward_kernel, values, sm, (4,), expected)


def rms_norm_gemma_bf16(sm: int) -> Launch:
    x, w = bf16(_x(2, 3, 512)), bf16(_x(3, 512))
    v = from_bf16(x).astype(np.float64)
    want = v / np.sqrt((v**2).mean(1, keepdims=True) + 1e-6) * (1 + from_bf16(w))
    values = {
        "Y_ptr": np.zeros_like(x), "Y_row_stride": 512, "X_ptr": x, "X_row_stride": 512, "W_ptr": w, "W_row_stride": 1,
        "RSTD_ptr": np.zeros(3, np.float32), "RSTD_row_stride": 1, "n_cols": 512, "eps": 1e-6, "offset": 1.0,
        "casting_mode": 1, "elementwise_affine": True, "BLOCK_SIZE": 512,
    }  # fmt: skip
    launch = _launch(rms_norm._rms_norm_forward_kernel, values, sm, (3,), {})
    return _with_bf16(launch, {0: want})


def _with_bf16(launch: Launch, wanted: dict[int, np.ndarray]) -> Launch:
    """Outputs in bf16: within one unit of the last place of the rounded answer, which bits as integers show."""
    from dataclasses import replace

    expected = {place: Expected(values=bf16(want), rtol=0, atol=1.0) for place, want in wanted.items()}
    return replace(launch, expected={**launch.expected, **expected})


def layer_norm_f32(sm: int) -> Launch:
    x, w, b = _x(4, 5, 384), _x(5, 384), _x(6, 384)
    v = x.astype(np.float64)
    mean, var = v.mean(1, keepdims=True), v.var(1, keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    values = {
        "Y_ptr": np.zeros_like(x), "Y_row_stride": 384, "X_ptr": x, "X_row_stride": 384, "W_ptr": w, "W_row_stride": 1,
        "B_ptr": b, "B_row_stride": 1, "Mean_ptr": np.zeros(5, np.float32), "Mean_row_stride": 1,
        "RSTD_ptr": np.zeros(5, np.float32), "RSTD_row_stride": 1, "n_cols": 384, "eps": 1e-5, "BLOCK_SIZE": 512,
    }  # fmt: skip
    expected = {
        "Y_ptr": _near((v - mean) * rstd * w + b, atol=1e-5), "Mean_ptr": _near(mean[:, 0]),
        "RSTD_ptr": _near(rstd[:, 0]),
    }  # fmt: skip
    return _launch(layer_norm._layer_norm_forward_kernel, values, sm, (5,), expected)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def softmax_forward(sm: int) -> Launch:
    x = _x(7, 4, 300)
    values = {
        "Y_ptr": np.zeros_like(x), "Y_row_stride": 300, "X_ptr": x, "X_row_stride": 300, "n_cols": 300,
        "BLOCK_SIZE": 512,
    }  # fmt: skip
    return _launch(softmax._softmax_single_block_forward_kernel, values, sm, (4,), {"Y_ptr": _near(_softmax(x))})


def softmax_backward(sm: int) -> Launch:
    x, dy = _x(8, 4, 300), _x(9, 4, 300)
    y = _softmax(x)
    y32 = y.astype(np.float32)
    want = y32 * (dy - (dy.astype(np.float64) * y32).sum(1, keepdims=True))
    values = {
        "dy_ptr": dy, "dy_stride": 300, "y_ptr": y32, "y_stride": 300, "dx_ptr": np.zeros_like(x), "dx_stride": 300,
        "n_cols": 300, "BLOCK_SIZE": 512,
    }  # fmt: skip
    return _launch(softmax._softmax_single_block_backward_kernel, values, sm, (4,), {"dx_ptr": _near(want)})


def swiglu_forward(sm: int) -> Launch:
    a, b = _x(10, 3, 500), _x(11, 3, 500)
    v = a.astype(np.float64)
    values = {
        "a_ptr": a, "b_ptr": b, "c_ptr": np.zeros_like(a), "stride": 500, "gate_multiplier": 1.0, "n_cols": 500,
        "BLOCK_SIZE": 512,
    }  # fmt: skip
    return _launch(swiglu._swiglu_forward_kernel, values, sm, (3,), {"c_ptr": _near(v / (1 + np.exp(-v)) * b)})


def swiglu_backward(sm: int) -> Launch:
    a, b, dc = _x(12, 3, 500), _x(13, 3, 500), _x(14, 3, 500)
    v = a.astype(np.float64)
    s = 1 / (1 + np.exp(-v))
    values = {
        "dc_ptr": dc, "a_ptr": a, "b_ptr": b, "stride": 500, "gate_multiplier": 1.0, "n_cols": 500, "BLOCK_SIZE": 512,
    }  # fmt: skip
    expected = {"b_ptr": _near(dc * v * s), "a_ptr": _near(dc * (v * s * (1 - s) + s) * b, atol=1e-5)}
    return _launch(swiglu._swiglu_backward_kernel, values, sm, (3,), expected)


def geglu_forward(sm: int) -> Launch:
    a, b = _x(15, 3, 500), _x(16, 3, 500)
    v = a.astype(np.float64)
    want = 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))) * b
    values = {"a": a, "b": b, "c": np.zeros_like(a), "stride": 500, "n_cols": 500, "BLOCK_SIZE": 512}
    return _launch(geglu._geglu_tanh_forward_kernel, values, sm, (3,), {"c": _near(want)})


def relu_squared_forward(sm: int) -> Launch:
    x = _x(17, 3, 500)
    values = {
        "Y_ptr": np.zeros_like(x), "Y_stride": 500, "X_ptr": x, "X_stride": 500, "n_cols": 500, "BLOCK_SIZE": 512,
    }  # fmt: skip
    want = np.maximum(x, 0).astype(np.float64) ** 2
    return _launch(relu_squared._relu_squared_forward_kernel, values, sm, (3,), {"Y_ptr": _near(want)})


def kl_div_forward(sm: int) -> Launch:
    y, gt = _x(18, 4, 700), _softmax(_x(19, 4, 700)).astype(np.float32)
    t = gt.astype(np.float64)
    values = {
        "y_ptr": y, "y_stride": 700, "gt_ptr": gt, "gt_stride": 700, "loss_ptr": np.zeros(4, np.float32),
        "loss_stride": 1, "n_cols": 700, "eps": 1e-10, "BLOCK_SIZE": 256, "reduction": 1, "log_target": False,
    }  # fmt: skip
    want = (t * (np.log(np.maximum(t, 1e-10)) - y)).sum(1)
    return _launch(kl_div._kldiv_kernel_forward, values, sm, (4,), {"loss_ptr": _near(want, 1e-4, 1e-5)})


def total_variation(sm: int) -> Launch:
    p, q = (_softmax(_x(s, 4, 500)).astype(np.float32) for s in (20, 21))
    values = {
        "p_ptr": p, "p_stride": 500, "q_ptr": q, "q_stride": 500, "loss_ptr": np.zeros(4, np.float32),
        "loss_stride": 1, "grads_ptr": np.zeros_like(p), "grads_stride": 500, "label_ptr": np.zeros(4, np.int64),
        "ignore_index": -100, "n_cols": 500, "scale": 0.25, "BLOCK_SIZE": 256, "HAS_LABEL": False, "reduction": 1,
    }  # fmt: skip
    gap = p.astype(np.float64) - q
    expected = {"loss_ptr": _near(0.125 * np.abs(gap).sum(1)), "grads_ptr": _near(0.125 * np.sign(gap))}
    return _launch(tvd._tv_distance_kernel, values, sm, (4,), expected)


def cross_entropy(smoothing: float, sm: int) -> Launch:
    n, rows = 1000, 5
    x, y = _x(22, rows, n) * 3, np.array([3, 999, -100, 500, 0], np.int64)
    v = x.astype(np.float64)
    lse = np.log(np.exp(v - v.max(1, keepdims=True)).sum(1)) + v.max(1)
    on = y >= 0
    at = np.where(on, y, 0)
    nll = lse - v[np.arange(rows), at]
    smooth = smoothing * (lse - v.mean(1))
    loss = np.where(on, ((1 - smoothing) * nll + smooth) / 4, 0)
    grad = (np.exp(v - lse[:, None]) - smoothing / n) / 4
    grad[np.arange(rows), at] -= (1 - smoothing) / 4
    grad[~on] = 0
    values = {
        "X_ptr": x, "X_stride": n, "Y_ptr": y, "Y_stride": 1, "weight_ptr": x, "loss_ptr": np.zeros(rows, np.float32),
        "z_loss_ptr": np.zeros(rows, np.float32), "loss_stride": 1, "token_accuracy_ptr": np.zeros(rows, np.float32),
        "token_accuracy_stride": 1, "predicted_tokens_ptr": np.zeros(rows, np.int64), "predicted_tokens_stride": 1,
        "n_cols": n, "n_non_ignore": 4, "sum_non_ignore_weight": 4.0, "weight_sum": 0.0, "ignore_index": -100,
        "lse_square_scale": 0.0, "label_smoothing": smoothing, "reduction": "mean", "softcap": 0.0,
        "RETURN_Z_LOSS": 0, "RETURN_TOKEN_ACCURACY": 1, "RETURN_PREDICTED_TOKENS": 1, "BLOCK_SIZE": 512,
        "HAS_WEIGHT": False, "HAS_SOFTCAPPING": False, "HAS_GRADIENTS": True,
    }  # fmt: skip
    best = x.argmax(1)
    expected = {
        "X_ptr": _near(grad, 1e-4, 1e-7), "loss_ptr": _near(loss, 1e-5, 1e-5),
        "predicted_tokens_ptr": Expected(values=np.where(on, best, -1)),
        "token_accuracy_ptr": _near(np.where(on, best == y, 0)),
    }  # fmt: skip
    # The stores of a row's zeros for an ignored target never meet the loads: one row a program.
    return _launch(ce.liger_cross_entropy_kernel, values, sm, (rows,), expected)


def rotary(sm: int) -> Launch:
    tokens, heads, kv, d = 6, 4, 2, 32
    q, k = _x(23, tokens, heads, d), _x(24, tokens, kv, d)
    angle = np.arange(tokens)[:, None] / 10000 ** (np.arange(d // 2) / (d // 2))
    cos, sin = (np.concatenate([f(angle)] * 2, 1).astype(np.float32) for f in (np.cos, np.sin))

    def turned(x: np.ndarray) -> np.ndarray:
        half = d // 2
        swapped = np.concatenate([-x[..., half:], x[..., :half]], -1).astype(np.float64)
        return x * cos[:, None] + swapped * sin[:, None]

    values = {
        "q_ptr": q, "q_row_stride": heads * d, "k_ptr": k, "k_row_stride": kv * d, "cos": cos, "cos_row_stride": d,
        "sin": sin, "sin_row_stride": d, "sl": tokens, "bs": 1, "cos_bs": 1, "n_qh": heads, "n_kh": kv, "hd": d,
        "pad_n_qh": 4, "pad_n_kh": 2, "pad_hd": d, "pad_rd": d, "rd": d, "BLOCK_SIZE": 4, "BACKWARD_PASS": False,
    }  # fmt: skip
    expected = {"q_ptr": _near(turned(q)), "k_ptr": _near(turned(k))}
    return _launch(rope._triton_rope, values, sm, (tokens,), expected)


def poly_norm_forward(sm: int) -> Launch:
    x, w, b = _x(25, 3, 400), np.array([0.3, 0.5, 0.2], np.float32), np.array([0.1], np.float32)
    v = x.astype(np.float64)
    unit = lambda u: u / np.sqrt((u**2).mean(1, keepdims=True) + 1e-6)  # noqa: E731
    want = w[0] * unit(v**3) + w[1] * unit(v**2) + w[2] * unit(v) + b
    values = {
        "Y_ptr": np.zeros_like(x), "Y_row_stride": 400, "X_ptr": x, "X_row_stride": 400, "W_ptr": w, "B_ptr": b,
        "RSTD_ptr": np.zeros((3, 3), np.float32), "RSTD_row_stride": 3, "n_cols": 400, "eps": 1e-6, "BLOCK_SIZE": 512,
    }  # fmt: skip
    return _launch(poly_norm._poly_norm_forward_kernel, values, sm, (3,), {"Y_ptr": _near(want, atol=1e-5)})


BUILDERS: dict[str, Callable[[int], Launch]] = {
    "rms_norm-f32": rms_norm_f32,
    "rms_norm-gemma-bf16": rms_norm_gemma_bf16,
    "layer_norm-f32": layer_norm_f32,
    "softmax-single": softmax_forward,  # the multi-block kernel is refused by Triton 3.9 itself
    "softmax-backward": softmax_backward,
    "swiglu": swiglu_forward,
    "swiglu-backward": swiglu_backward,
    "geglu": geglu_forward,
    "relu_squared": relu_squared_forward,
    "kl_div": kl_div_forward,
    "tvd": total_variation,
    "cross_entropy": partial(cross_entropy, 0.0),
    "cross_entropy-smooth": partial(cross_entropy, 0.1),
    "rope": rotary,
    "poly_norm": poly_norm_forward,
}


def cases() -> list[Case]:
    return [Case(name=f"{n}-sm_{sm}", package="liger", build=partial(f, sm)) for sm in SMS for n, f in BUILDERS.items()]
