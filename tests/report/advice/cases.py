"""Small models with one problem each, and the same models with the suggestion followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.report.advice.given import GIVEN
from tests.report.advice.models import (
    GAINS,
    SIZE,
    Convolved,
    Forward,
    Grouped,
    Recurrent,
    Weighted,
    activations,
    by_hand,
    dynamic,
    heads,
    images,
    in_parts,
    integers,
    linear,
    of_batch,
    one_linear,
    per_feature,
    quantized,
    rounded,
    sequences,
    shifted,
    static,
    weight,
)
from torch import nn

from qfuse.ir.events import MissCode

_PT2E = torch.ops.quantized_decomposed


@dataclass(frozen=True, eq=False)
class Case:
    """A problem, and what remains of it when the suggestion is followed.

    Attributes:
        advice: Name of the suggestion.
        code: Code of the miss; ``None`` for an op that was left.
        problem: Makes the model with the problem.
        solution: Makes the model that follows the suggestion.
        inputs: Makes the inputs of the model with the problem.
        better: Makes those of the other; the same if ``None``.
        options: Options that are the problem.
    """

    advice: str
    code: MissCode | None
    problem: Callable[[], nn.Module]
    solution: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]] = activations
    better: Callable[[], tuple[torch.Tensor, ...]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _convolution(name: str, code: MissCode, **before: Any) -> Case:
    return Case(name, code, lambda: Convolved(**before), lambda: Convolved(by_pt2e=True), images)


def _case(advice: str, code: MissCode | None, problem: Forward, solution: Forward) -> Case:
    return Case(advice, code, lambda: Weighted(problem), lambda: Weighted(solution))


def _of_experts(m: Weighted, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Multiply each row that is read with the weights of the one of four experts that ``x`` names."""
    expert = x[:, 0].abs().long() % 4
    return torch.bmm(by_hand(m).view(4, SIZE // 4, SIZE)[expert], read[:, :, None])


def _integers(m: Weighted, q: torch.Tensor) -> torch.Tensor:
    return torch.mm(q.to(torch.int32), m.w.to(torch.int32).t()).float() * 0.01


def _of_batch(m: Weighted, x: torch.Tensor, *, before: bool) -> torch.Tensor:
    """Multiply with a batch of four weights that is scaled before the product or after it."""
    weights = m.w.view(4, SIZE // 4, SIZE).to(x.dtype)
    scale, x = (m.s * 0.01).to(x.dtype), x.view(4, SIZE // 4, SIZE // 4)
    return torch.bmm(x, weights * scale) if before else torch.bmm(x, weights) * scale


def _sixteen(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(torch.round(x / 0.001), -32768, 32767).to(torch.int16)


def _twice(second: float) -> Forward:
    """Two quantized users of one linear."""

    def forward(m: Weighted, x: torch.Tensor) -> torch.Tensor:
        y = linear(m, x)
        return F.linear(static(y), weight(m)) * F.linear(static(y, second), weight(m))

    return forward


def _then(op: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    """An op between two linears."""
    return lambda m, x: F.linear(static(op(linear(m, x)), 0.5), weight(m))


def _joined(second: float) -> Forward:
    """A concatenation of a linear's result and the input."""

    def forward(m: Weighted, x: torch.Tensor) -> torch.Tensor:
        parts = [static(linear(m, x), 0.05), static(x, second)]
        return F.linear(torch.cat(parts), weight(m))

    return forward


def _moved(inner: float, outer: float) -> Forward:
    """A linear, quantized twice in a row."""
    return lambda m, x: F.linear(static(static(linear(m, x), inner), outer), weight(m))


def _run_time(m: Weighted, x: torch.Tensor) -> torch.Tensor:
    moved = m.w + x.to(torch.int8)[0, 0]
    made = _PT2E.dequantize_per_channel(moved, m.s, m.z, 0, -128, 127, torch.int8)
    return F.linear(x, made)


def _doubled(m: Weighted, x: torch.Tensor) -> torch.Tensor:
    return F.linear(static(x.float()).double(), m.w.double() * m.s.double()[:, None])


def _given(advice: str, code: MissCode | None, problem: Forward, solution: Forward) -> Case:
    """A linear of int8 values that are passed in with a scale per row and a zero point of int32."""
    return Case(advice, code, lambda: Weighted(problem), lambda: Weighted(solution), integers)


SIXTEEN_BITS = _case(
    "integer-operands",
    MissCode.DTYPE,
    lambda m, x: _integers(m, _sixteen(x)),
    lambda m, x: _integers(m, (x / 0.05).round().clamp(-128, 127).to(torch.int8)),
)
CASES = (
    Case("quantize-weight", MissCode.NOT_QUANTIZED, one_linear, lambda: quantized(one_linear())),
    Case(
        "quantize-parameter",
        MissCode.NOT_QUANTIZED,
        lambda: Weighted(lambda m, x: F.linear(x, m.f)),
        lambda: quantized(one_linear()),
    ),
    _convolution("quantize-convolution", MissCode.NOT_QUANTIZED, by_pt2e=False),
    _case(
        "cast-to-8-bits",
        MissCode.DTYPE,
        lambda m, x: F.linear(torch.clamp(torch.round(x / 0.05), -128, 127) * 0.05, by_hand(m)),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    _case(
        "quantize-without-eager-mode",
        None,
        lambda m, x: F.linear(
            torch.quantize_per_tensor(x, 0.05, 5, torch.qint8).dequantize(), weight(m)
        ),
        linear,
    ),
    _case(
        "zero-point-in-range",
        MissCode.ZERO_POINT,
        lambda m, x: shifted(m, x, 300),
        lambda m, x: shifted(m, x, 128),
    ),
    *(_given(*parts) for parts in GIVEN),
    _case(
        "quantize-both",
        MissCode.NOT_QUANTIZED,
        lambda m, x: F.linear(static(x), m.w.float() * (x.mean() * m.s[:, None])),
        linear,
    ),
    _case("quantize-last", MissCode.NOT_QUANTIZED, *GAINS),
    Case(
        "scale-before-product",
        MissCode.NOT_QUANTIZED,
        lambda: Weighted(partial(_of_batch, before=False)),
        lambda: Weighted(partial(_of_batch, before=True)),
        lambda: activations(dtype=torch.float16),
    ),
    Case(
        "recurrent-as-linears",
        MissCode.NOT_QUANTIZED,
        lambda: Recurrent(as_linears=False),
        lambda: Recurrent(as_linears=True),
        sequences,
    ),
    _case(
        "weight-on-the-right",
        MissCode.PATTERN,
        lambda m, x: torch.bmm(of_batch(m), x.view(4, 16, SIZE).mT),
        lambda m, x: torch.bmm(x.view(4, 16, SIZE), of_batch(m).mT).mT,
    ),
    _case(
        "einsum-as-linear",
        None,
        lambda m, x: torch.einsum("oc,bct->bot", by_hand(m), rounded(x).view(2, -1, SIZE).mT),
        lambda m, x: F.linear(rounded(x).view(2, -1, SIZE), by_hand(m)).mT,
    ),
    Case(
        "float32",
        MissCode.NO_KERNEL,
        lambda: Weighted(lambda m, x: F.linear(x, by_hand(m).double())),
        lambda: Weighted(lambda m, x: F.linear(x, by_hand(m))),
        lambda: activations(dtype=torch.float64),
        activations,
    ),
    _case("constant-weight", MissCode.NOT_CONSTANT, _run_time, lambda m, x: F.linear(x, weight(m))),
    _case(
        "round-to-nearest",
        MissCode.PATTERN,
        lambda m, x: F.linear(
            torch.clamp(torch.floor(x / 0.05), -128, 127).to(torch.int8).float() * 0.05, by_hand(m)
        ),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    _case(
        "round-to-nearest",
        MissCode.RANGE,
        lambda m, x: F.linear(
            torch.trunc(torch.clamp(x / 0.05, -128, 127)).to(torch.int8).float() * 0.05, by_hand(m)
        ),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    _case(
        "clamp-before-cast",
        MissCode.RANGE,
        lambda m, x: F.linear(torch.round(x / 0.05).to(torch.int8).float() * 0.05, by_hand(m)),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    _case(
        "clamp-to-the-range",
        MissCode.RANGE,
        lambda m, x: F.linear(rounded(x, -200), by_hand(m)),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    _case(
        "integer-zero-point",
        MissCode.ZERO_POINT,
        lambda m, x: F.linear(
            (torch.clamp(torch.round(x / 0.05) + 3, -128, 127).to(torch.int8).float() - 2.5) * 0.05,
            by_hand(m),
        ),
        lambda m, x: F.linear(
            (torch.clamp(torch.round(x / 0.05) + 3, -128, 127).to(torch.int8).float() - 3) * 0.05,
            by_hand(m),
        ),
    ),
    _case(
        "least-scale",
        MissCode.PATTERN,
        lambda m, x: F.linear(dynamic(x, least=None), by_hand(m)),
        lambda m, x: F.linear(dynamic(x), by_hand(m)),
    ),
    _case(
        "scale-of-the-range",
        MissCode.RANGE,
        lambda m, x: F.linear(dynamic(x, 128.0), by_hand(m)),
        lambda m, x: F.linear(dynamic(x), by_hand(m)),
    ),
    _case(
        "integer-operands",
        MissCode.DTYPE,
        _integers,
        lambda m, x: _integers(m, torch.clamp(torch.round(x / 0.05), -128, 127).to(torch.int8)),
    ),
    _case("one-scale-for-parts", MissCode.GRANULARITY, _joined(0.06), _joined(0.05)),
    _case("one-quantize", MissCode.SHARED, _twice(0.06), _twice(0.05)),
    _case("same-scale-on-both-sides", None, _moved(0.05, 0.07), _moved(0.05, 0.05)),
    _case(
        "same-scale-on-both-sides",
        MissCode.ORDER,
        lambda m, x: F.linear(static(static(linear(m, x), 0.05)[:32], 0.07), weight(m)),
        lambda m, x: F.linear(static(static(linear(m, x), 0.05)[:32], 0.05), weight(m)),
    ),
    _case(
        "leaky-relu",
        MissCode.SHARED,
        _then(lambda y: torch.maximum(y, 0.1 * y)),
        _then(lambda y: F.leaky_relu(y, 0.1)),
    ),
    _case(
        "squared-relu",
        MissCode.ARITHMETIC,
        _then(lambda y: torch.where(y > 0, y * y, 0.0)),
        _then(lambda y: torch.relu(y) ** 2),
    ),
    _case(
        "multiply-by-the-reciprocal",
        MissCode.ARGUMENT,
        _then(lambda y: torch.relu(y) / 0.7),
        _then(lambda y: torch.relu(y) * (1 / 0.7)),
    ),
    _case(
        "quantize-activations-of-experts",
        MissCode.NOT_QUANTIZED,
        lambda m, x: _of_experts(m, x, x),
        lambda m, x: _of_experts(m, x, static(x)),
    ),
    _case(
        "quantize-other-operand",
        MissCode.NOT_QUANTIZED,
        lambda _, x: x.view(1, 4, 16, SIZE) @ heads(x).transpose(-1, -2),
        lambda _, x: heads(x) @ heads(x).transpose(-1, -2),
    ),
    _case(
        "attention-in-parts",
        None,
        lambda _, x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
        lambda _, x: in_parts(x),
    ),
    _case(
        "float-op-between",
        None,
        lambda m, x: torch.sin(static(linear(m, x), 0.5)),
        lambda m, x: torch.sin(linear(m, x)),
    ),
    Case(
        "own-kernels",
        MissCode.NO_KERNEL,
        lambda: Weighted(lambda m, x: F.linear(static(x, dtype=torch.uint8), weight(m))),
        lambda: Weighted(lambda m, x: F.linear(static(x, dtype=torch.uint8), weight(m))),
        options={"own_kernels": False},
    ),
    _case(
        "weight-scale-per-output",
        MissCode.NO_KERNEL,
        lambda m, x: F.linear(static(x), weight(m, axis=1)),
        linear,
    ),
    _case(
        "weight-scale-per-output",
        MissCode.NO_KERNEL,
        lambda m, x: F.linear(x, weight(m, axis=1)),
        lambda m, x: F.linear(x, weight(m)),
    ),
    _convolution("weight-scale-per-output", MissCode.NO_KERNEL, by_pt2e=True, axis=1),
    Case("group-size", MissCode.NO_KERNEL, lambda: Grouped(4), lambda: Grouped(32)),
    Case(
        "activation-scale-per-tensor",
        MissCode.NO_KERNEL,
        lambda: Convolved(by_pt2e=True, per_image=True),
        lambda: Convolved(by_pt2e=True),
        images,
    ),
    _case(
        "activation-scale-per-row",
        MissCode.NO_KERNEL,
        lambda m, x: F.linear(per_feature(m, x), weight(m)),
        linear,
    ),
    _case(
        "activation-of-8-bits",
        MissCode.NO_KERNEL,
        lambda m, x: F.linear(static(x, 0.001, torch.int16), weight(m)),
        linear,
    ),
    _case(
        "activation-of-8-bits",
        MissCode.NO_KERNEL,
        lambda m, x: F.linear(_sixteen(x).float() * 0.001, by_hand(m)),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    _case(
        "activation-of-8-bits",
        None,
        lambda m, x: F.linear(_sixteen(x).float(), m.w.float()) * (m.s * 0.001),
        lambda m, x: F.linear(rounded(x), by_hand(m)),
    ),
    SIXTEEN_BITS,
    Case(
        "float32",
        MissCode.NO_KERNEL,
        lambda: Weighted(_doubled),
        lambda: Weighted(linear),
        lambda: activations(dtype=torch.float64),
        activations,
    ),
    Case(
        "switched-on",
        MissCode.BANNED,
        lambda: Weighted(linear),
        lambda: Weighted(linear),
        options={"without": ["fuse-linear"]},
    ),
)
"""The suggestions about a model. Those about the installation have tests of their own."""
