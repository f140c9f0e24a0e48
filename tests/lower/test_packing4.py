"""Weights of four bits, packed with the parameters of every group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qfuse.ir import ops
from qfuse.ir.quant_math import dequantize
from qfuse.ir.quant_spec import Arithmetic, QuantSpec
from qfuse.ir.schema import is_call
from qfuse.ir.views import as_dequantize
from qfuse.kernels.pack4 import unpack_weight4
from qfuse.lower.groups import first_code, fits_four_bits, group_count
from qfuse.lower.kernel import Refusal
from qfuse.lower.packing import Packer
from qfuse.testing.build import GraphBuilder

N, K = 70, 64
SPEC = QuantSpec(torch.int8, -8, 7, (1, 32))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.int8, -8, 7), (torch.uint8, 0, 15), (torch.int8, -7, 7), (torch.int8, 3, 18)],
)
@pytest.mark.parametrize("block", [(1, 32), (1, None), (None, None), (32, 16), (1, K), (1, 8)])
@pytest.mark.parametrize("zero_point", [False, True])
def test_codes_and_parameters_say_what_the_source_says(
    dtype: torch.dtype, low: int, high: int, block: tuple[int | None, ...], zero_point: bool
) -> None:
    spec = QuantSpec(dtype, low, high, block)
    b = GraphBuilder()
    q = torch.randint(low, high + 1, (N, K)).to(dtype)
    scale = torch.rand(spec.grid((N, K)))
    zero = torch.randint(low, high + 1, spec.grid((N, K))) if zero_point else None
    nodes = [b.const("q", q), b.const("s", scale), zero if zero is None else b.const("z", zero)]
    program = b.done(b.call(ops.dequantize, *nodes, str(spec)))
    (node,) = (n for n in program.graph.nodes if is_call(n, ops.dequantize))
    view = as_dequantize(node)
    assert view is not None
    packer = Packer()

    packed = packer.pack4(view.q, view.params)

    groups = group_count(spec, K)
    assert isinstance(groups, int)
    assert packed.scales.shape == packed.zero_points.shape == (groups, N)
    codes = unpack_weight4(packed.weight, N, K).to(torch.int32)
    size = K // packed.scales.shape[0]
    steps = codes - packed.zero_points.t().repeat_interleave(size, 1)
    weight = steps.float() * packed.scales.t().repeat_interleave(size, 1)
    assert torch.equal(weight, dequantize(q, scale, zero, spec))
    assert packer.pack4(view.q, view.params) is packed


def test_the_zero_point_of_a_symmetric_range_is_the_middle_code() -> None:
    stored = torch.zeros(2, 8, dtype=torch.int8)

    assert first_code(stored, SPEC) == -8
    assert first_code(stored, replace(SPEC, quant_min=-7)) == -8
    assert first_code(stored, QuantSpec(torch.uint8, 0, 15, (1, 32))) == 0
    assert first_code(stored + 9, SPEC) == 9, "numbers beyond the range are taken as they are"


def test_sixteen_numbers_in_a_row_fit() -> None:
    assert fits_four_bits(torch.tensor([[-8, 7]], dtype=torch.int8))
    assert fits_four_bits(torch.zeros(0, 8, dtype=torch.int8))
    assert not fits_four_bits(torch.tensor([[-9, 7]], dtype=torch.int8))
    assert not fits_four_bits(torch.tensor([[0.0, 1.0]]))


def test_scales_are_rounded_as_the_source_rounds_them() -> None:
    spec = replace(SPEC, arithmetic=Arithmetic(torch.bfloat16), real=torch.bfloat16)
    b = GraphBuilder()
    scale = torch.rand(N, 2)
    node = b.call(
        ops.dequantize, b.const("q", torch.ones(N, K, dtype=torch.int8)), b.const("s", scale), None,
        str(spec),
    )  # fmt: skip
    view = as_dequantize(
        b.done(node).graph.find_nodes(op="call_function", target=ops.dequantize)[0]
    )
    assert view is not None

    packed = Packer().pack4(view.q, view.params)

    assert torch.equal(packed.scales, scale.bfloat16().float().t())


@pytest.mark.parametrize(
    ("block", "k", "groups"),
    [((1, 32), 64, 2), ((1, None), 7, 1), ((1, 100), 7, 1), ((None, 8), 16, 2), ((1, None), 0, 1)],
)
def test_counts_groups(block: tuple[int | None, ...], k: int, groups: int) -> None:
    assert group_count(replace(SPEC, block=block), k) == groups


@pytest.mark.parametrize(
    ("block", "k", "reason"),
    [((1, 12), 24, "multiple of 8"), ((1, 32), 48, "must be whole"), ((1, 32), 0, "no input")],
)
def test_refuses_groups(block: tuple[int | None, ...], k: int, reason: str) -> None:
    refusal = group_count(replace(SPEC, block=block), k)

    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
