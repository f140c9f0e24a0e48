"""Weights of four bits, packed with the parameters of every group."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch.fx import Node

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.reference import dequantize
from qfuse.ir.quant.spec import Arithmetic, QuantSpec
from qfuse.ir.refusal import Refusal
from qfuse.kernels.pack4 import unpack_weight4
from qfuse.lower.operands.groups import (
    check_four_bits,
    first_value,
    group_count,
    group_scales,
    group_zero_points,
)
from qfuse.lower.operands.packing import Packer, least_value
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

    packed = packer.pack_values(q, view.params.spec, 4)

    groups = group_count(spec, K)
    assert isinstance(groups, int)
    scales = group_scales(view.params, q.shape)
    zeros = group_zero_points(view.params, q.shape) - least_value(q, view.params.spec, 4)
    assert scales.shape == zeros.shape == (groups, N)
    codes = unpack_weight4(packed, N, K).to(torch.int32)
    steps = codes - zeros.t().repeat_interleave(K // groups, 1)
    weight = steps.float() * scales.t().repeat_interleave(K // groups, 1)
    assert torch.equal(weight, dequantize(q, scale, zero, spec))
    assert packer.pack_values(q, view.params.spec, 4) is packed


def test_the_zero_point_of_a_symmetric_range_is_the_middle_code() -> None:
    stored = torch.zeros(2, 8, dtype=torch.int8)

    assert first_value(stored, SPEC) == -8
    assert first_value(stored, replace(SPEC, quant_min=-7)) == -8
    assert first_value(stored, QuantSpec(torch.uint8, 0, 15, (1, 32))) == 0
    assert first_value(stored + 9, SPEC) == 9, "numbers beyond the range are taken as they are"


def test_sixteen_numbers_in_a_row_fit() -> None:
    assert check_four_bits(torch.tensor([[-8, 7]], dtype=torch.int8)) is None
    assert check_four_bits(torch.zeros(0, 8, dtype=torch.int8)) is None
    assert check_four_bits(torch.tensor([[-9, 7]], dtype=torch.int8)) is not None
    assert check_four_bits(torch.tensor([[0.0, 1.0]])) is not None


def test_scales_are_rounded_as_the_source_rounds_them() -> None:
    spec = replace(SPEC, arithmetic=Arithmetic(torch.bfloat16), float_dtype=torch.bfloat16)
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

    scales = group_scales(view.params, (N, K))

    assert torch.equal(scales, scale.bfloat16().float().t())


def weight_of(q: torch.Tensor, spec: QuantSpec) -> tuple[Node, QuantParams]:
    """A constant weight, with scales for its groups."""
    b = GraphBuilder()
    nodes = b.const("q", q), b.const("s", torch.rand(spec.grid(q.shape)))
    program = b.done(b.call(ops.dequantize, *nodes, None, str(spec)))
    view = as_dequantize(program.graph.find_nodes(op="call_function", target=ops.dequantize)[0])
    assert view is not None
    return view.q, view.params


def test_all_rows_share_the_codes_of_a_weight() -> None:
    """Each in its own parameters, whoever comes first."""
    for bits, low, high in ((4, 0, 16), (8, -128, 128), (8, 0, 256)):
        dtype = torch.int8 if low < 0 else torch.uint8
        spec = QuantSpec(dtype, low, high - 1, (1, 32))
        for first in (True, False):
            q = torch.randint(low, high, (N, K)).to(dtype)
            node, params = weight_of(q, spec)
            stored, packer = constant_of(node), Packer()
            assert stored is not None
            codes = packer.pack_values(stored, spec, bits) if first else None
            grouped = packer.pack_grouped(node, params, four=bits == 4)

            codes = packer.pack_values(stored, spec, bits) if codes is None else codes
            assert codes is grouped.weight
            if bits == 8:
                assert packer.pack(node, params).weight is codes


def test_halves_of_whole_blocks_share_the_codes_too() -> None:
    spec = QuantSpec(torch.int8, -128, 127, (1, None))
    for n, shared in ((128, True), (70, False)):
        node, params = weight_of(torch.randint(-128, 128, (n, K)).to(torch.int8), spec)
        packer = Packer()

        whole, halves = (packer.pack(node, params, halves=h).weight for h in (False, True))

        assert (whole is halves) == shared


def test_a_tensor_that_was_packed_lives_as_long_as_what_was_made_of_it() -> None:
    """Another could have its identity otherwise."""
    packer = Packer()
    stored = torch.zeros(N, K, dtype=torch.int8)
    alive = ref(stored)
    packer.pack_values(stored, SPEC, 4)
    del stored

    assert alive() is not None
    del packer
    assert alive() is None


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
