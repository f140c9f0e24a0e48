from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch.fx import Node

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Fired, Lowered, Noted
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph, OptimizedGraph
from qfuse.ir.sizes import same_strides
from qfuse.kernels import KernelLibrary
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32, BF16, F16, BOOL = torch.float32, torch.bfloat16, torch.float16, torch.bool
SDPA = aten.scaled_dot_product_attention.default


@pytest.fixture(scope="module", autouse=True)
def library() -> KernelLibrary:
    library = kernels.load()
    if not library.available:
        pytest.skip(library.reason)
    return library


class Attention(GraphBuilder):
    """A graph of attention, whose operands are views of projections."""

    def heads(
        self, name: str, rows: int | str, heads: int = 4, features: int = 8, **kind: Any
    ) -> Node:
        batch, dtype = kind.get("batch", "n"), kind.get("dtype", F32)
        x = self.arg(name, dtype, batch, rows, heads, features)
        return self.call(aten.transpose.int, x, 1, 2)

    def operands(self, rows: int | str = 20, keys: int | str = 30, shared: int = 4) -> list[Node]:
        q = self.heads("q", rows)
        return [q, *(self.heads(name, keys, shared) for name in "kv")]


def lowered(
    program: OptimizedGraph,
    library: KernelLibrary | None = None,
    target: Target | None = None,
) -> LoweredGraph:
    registry = all_kernels(library or kernels.load())
    cost = CostModel(CostProfile.pinned())
    return lower(clone(program), target or Target.for_testing(), cost, registry)


def calls(low: LoweredGraph) -> list[Node]:
    op = torch.ops.qfuse.attention.default
    return [node for node in low.graph.nodes if is_call(node, op)]


# Weights and the result are rounded to the dtype.
TOLERANCES = {F32: (2e-5, 2e-6), BF16: (2**-7, 2**-6), F16: (2**-9, 2**-9)}


def check(
    program: OptimizedGraph, low: LoweredGraph, dtype: torch.dtype = F32, **sizes: int
) -> None:
    inputs = random_inputs(program, **sizes)
    rtol, atol = TOLERANCES[dtype]
    for old, new in zip(run(program, inputs), run(low, inputs), strict=True):
        assert old.dtype is new.dtype is dtype
        torch.testing.assert_close(old, new, rtol=rtol, atol=atol)
        assert same_strides(old, new)


def notes(low: LoweredGraph) -> list[str]:
    start = "attention is left to torch's kernel: "
    return [note.text.removeprefix(start) for note in low.log.of(Noted)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, 2])
def test_the_kernel_replaces_attention(causal: bool, scale: float | None) -> None:
    b = Attention()
    y = b.call(SDPA, *b.operands(), None, 0.0, causal, scale=scale)
    program = b.done(y, stage=OptimizedGraph)
    low = lowered(program)

    (call,) = calls(low)
    a = arguments(call)
    assert (a["causal"], a["scale"]) == (causal, 8**-0.5 if scale is None else scale)
    # The report counts quantized ops, and this is a float one.
    assert not list(low.log.of(Lowered))
    assert [event.rule for event in low.log.of(Fired)] == ["lower-attention"]
    assert not notes(low)
    for n in (1, 3):
        check(program, low, n=n)


@pytest.mark.parametrize("dtype", [F32, BOOL])
@pytest.mark.parametrize(
    "shape", [(20, 30), (1, 30), ("n", 1, 1, 30), ("n", 4, 20, 30), (4, 20, 30), (20, 1)]
)
def test_masks(dtype: torch.dtype, shape: tuple[int | str, ...]) -> None:
    b = Attention()
    operands = b.operands()
    mask = b.arg("mask", dtype, *shape)
    program = b.done(b.call(SDPA, *operands, mask), stage=OptimizedGraph)
    low = lowered(program)

    assert len(calls(low)) == 1
    check(program, low, n=2)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("mask", [None, BOOL, F32, "same"])
def test_halves(dtype: torch.dtype, mask: Any) -> None:
    b = Attention()
    operands = [b.heads(name, 20 if name == "q" else 30, dtype=dtype) for name in "qkv"]
    if mask is not None:
        operands.append(b.arg("mask", dtype if mask == "same" else mask, "n", 1, 20, 30))
    program = b.done(b.call(SDPA, *operands), stage=OptimizedGraph)
    low = lowered(program)

    assert len(calls(low)) == 1
    check(program, low, dtype, n=2)


@pytest.mark.parametrize(
    ("dtype", "changes", "taken"),
    [
        (BF16, {"isa": "amx", "rows": 4}, True),
        (BF16, {"isa": "amx", "rows": 5}, False),
        (BF16, {"isa": "amx", "rows": "rows"}, False),
        (BF16, {"isa": "amx"}, False),
        (BF16, {"isa": "amx", "mkldnn_enabled": False}, True),
        (BF16, {"isa": "amx", "onednn_isa_limit": "AVX512_CORE_BF16"}, True),
        (F16, {"isa": "amx"}, True),
        (F16, {"features": {"avx2", "avx512_fp16"}}, False),
        (F32, {"features": {"avx2", "avx512_fp16", "amx_bf16"}}, True),
    ],
)
def test_torch_keeps_what_it_has_instructions_for(
    dtype: torch.dtype, changes: dict[str, Any], taken: bool
) -> None:
    b = Attention()
    rows = changes.get("rows", 20)
    operands = [b.heads(name, rows if name == "q" else 20, dtype=dtype) for name in "qkv"]
    program = b.done(b.call(SDPA, *operands), stage=OptimizedGraph)
    target = Target.for_testing(**({"isa": changes["isa"]} if "isa" in changes else {}))
    others = {key: value for key, value in changes.items() if key not in ("isa", "rows")}
    low = lowered(program, target=replace(target, **others))

    assert len(calls(low)) == taken
    name = str(dtype)[6:]
    assert notes(low) == ([] if taken else [f"torch has instructions for products of {name}"])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_one_token(dtype: torch.dtype) -> None:
    b = Attention()
    operands = [
        b.heads("q", 1, dtype=dtype), *(b.heads(name, "keys", 2, dtype=dtype) for name in "kv"),
        b.arg("mask", dtype, 1, 1, 1, "keys"),
    ]  # fmt: skip
    y = b.call(SDPA, *operands, enable_gqa=True)
    program = b.done(y, stage=OptimizedGraph)
    low = lowered(program)

    assert len(calls(low)) == 1
    for keys in (2, 600):
        check(program, low, dtype, n=2, keys=keys)


def test_heads_may_share_keys() -> None:
    b = Attention()
    y = b.call(SDPA, *b.operands(shared=2), None, 0.0, False, enable_gqa=True)
    program = b.done(y, stage=OptimizedGraph)
    low = lowered(program)

    assert len(calls(low)) == 1
    check(program, low, n=2)


@pytest.mark.parametrize("case", ["row-major", "wider values", "steps", "features outermost"])
def test_the_result_has_the_layout_of_torchs(case: str) -> None:
    b = Attention()
    q, k, v = b.operands()
    if case == "row-major":
        q = b.call(aten.clone.default, q, memory_format=torch.contiguous_format)
    elif case == "features outermost":
        q = b.call(aten.permute.default, b.arg("x", F32, 8, "n", 4, 20), [1, 2, 3, 0])
    elif case == "wider values":
        v = b.heads("wide", 30, features=12)
    else:
        q = b.call(aten.slice.Tensor, b.heads("steps", 20, features=16), 3, 0, 16, 2)
    program = b.done(b.call(SDPA, q, k, v), stage=OptimizedGraph)
    low = lowered(program)

    (call,) = calls(low)
    assert arguments(call)["order"] == [0, 1, 2]
    check(program, low, n=2)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_any_order_of_axes_in_memory(order: tuple[int, ...]) -> None:
    b = Attention()
    sizes = ("n", 4, 20)
    x = b.arg("x", F32, *(sizes[axis] for axis in order), 8)
    q = b.call(aten.permute.default, x, [*(order.index(axis) for axis in range(3)), 3])
    program = b.done(b.call(SDPA, q, b.heads("k", 30), b.heads("v", 30)), stage=OptimizedGraph)
    low = lowered(program)

    (call,) = calls(low)
    assert arguments(call)["order"] == list(order)
    check(program, low, n=2)


def test_dynamic_rows_and_keys() -> None:
    b = Attention()
    program = b.done(b.call(SDPA, *b.operands("rows", "keys")), stage=OptimizedGraph)
    low = lowered(program)

    assert len(calls(low)) == 1
    for rows, keys in ((1, 7), (15, 64), (16, 1), (50, 70)):
        check(program, low, n=2, rows=rows, keys=keys)


@pytest.mark.parametrize("where", ["above", "above twice", "behind", "behind a view", "none"])
def test_copies_of_heads_are_not_made(where: str) -> None:
    """As of heads that are made contiguous; a view to other sizes may need the copy."""
    b = Attention()
    x = b.arg("x", F32, "n", 20, 12, 8)
    if where == "behind a view":
        flat = b.call(aten.view.default, x, [-1, 20, 96])
        copy = b.call(aten.clone.default, b.call(aten.transpose.int, flat, 1, 2))
        apart = b.call(aten.view.default, copy, [-1, 12, 8, 20])
        heads = b.call(aten.transpose.int, apart, 2, 3)
    else:
        heads = b.call(aten.transpose.int, x, 1, 2)
        for _ in range({"above": 1, "above twice": 2}.get(where, 0)):
            heads = b.call(aten.clone.default, heads, memory_format=torch.contiguous_format)
    split = b.call(aten.split.Tensor, heads, 4, 1)
    parts = [b.item(split, i) for i in range(3)]
    if where == "behind":
        parts = [
            b.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            for part in parts
        ]
    program = b.done(b.call(SDPA, *parts), stage=OptimizedGraph)
    low = lowered(program)

    assert len(calls(low)) == 1
    kept = where == "behind a view"
    assert sum(is_call(node, aten.clone.default) for node in low.graph.nodes) == kept
    assert sum(is_call(node, aten.split.Tensor) for node in low.graph.nodes) == 1
    check(program, low, n=2)


SCALE_NOTE = "its scale is not known to be positive and at most 2^127"
SIZES_NOTE = "its operands broadcast, or their sizes are not known to fit"
REFUSED = {
    "dropout": "it has dropout",
    "float64": "it computes in float64",
    "unbatched": "its operands have other than 4 axes",
    "broadcast batch": SIZES_NOTE,
    "dynamic heads": "its heads or features are dynamic or none",
    "no features": "its heads or features are dynamic or none",
    "no scale": SCALE_NOTE,
    "negative": SCALE_NOTE,
    "small": SCALE_NOTE,
    "large": SCALE_NOTE,
    "claimed": None,
}


SCALES = {"no scale": 0.0, "negative": -1.0, "small": 1e-50, "large": 3e38}


def check_refused(b: Attention, y: Node, note: str | None) -> None:
    low = lowered(b.done(y, stage=OptimizedGraph))

    assert not calls(low)
    assert notes(low) == ([] if note is None else [note])


@pytest.mark.parametrize("case", REFUSED)
def test_other_attention_is_left_to_torch(case: str) -> None:
    b = Attention()
    dtype = torch.float64 if case == "float64" else F32
    heads: Any = "h" if case == "dynamic heads" else 4
    features = 0 if case == "no features" else 8
    q = b.heads("q", 20, heads, features, dtype=dtype)
    batch = 1 if case == "broadcast batch" else "n"
    k = b.heads("k", 30, heads, features, dtype=dtype, batch=batch)
    v = b.heads("v", 30, heads, features, dtype=dtype, batch=batch)
    # torch's kernel multiplies minus infinity by the scale where a causal key is not seen.
    causal, scale = case in SCALES, SCALES.get(case, 0.5)
    if case == "unbatched":
        q, k, v = (b.call(aten.select.int, x, 0, 0) for x in (q, k, v))
    dropout = 0.5 if case == "dropout" else 0.0
    y = b.call(SDPA, q, k, v, None, dropout, causal, scale=scale)
    if case == "claimed":
        y.meta[CLAIM_META] = "claimed by hand"

    check_refused(b, y, REFUSED[case])


MALFORMED = {
    "mixed": "its operands have different dtypes",
    "heads that may not share": SIZES_NOTE,
    "masked and causal": "it is causal and has a mask",
    "integers": "its mask is int64",
    "mask of one axis": "its mask does not have the axes of the scores",
    "unknown mask": "its mask does not have the axes of the scores",
    "features outermost": "its result does not have features innermost, without gaps",
}
"""What torch refuses, or a graph may have in spite of it."""


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_attention_is_left_to_torch(case: str) -> None:
    b = Attention()
    q, k, v = b.operands()
    few = b.heads("few", 30, 2)
    half = b.heads("half", 30, dtype=BF16)
    mask = b.arg("mask", F32, 20, 30)
    integers = b.arg("integers", torch.int64, 20, 30)
    row = b.arg("row", F32, 30)
    unknown = b.arg("unknown", F32, "m", 1, 20, 30)
    y = b.call(SDPA, q, k, v)
    y.args = {
        "mixed": (q, k, half),
        "heads that may not share": (q, few, few),
        "masked and causal": (q, k, v, mask, 0.0, True),
        "integers": (q, k, v, integers),
        "mask of one axis": (q, k, v, row),
        "unknown mask": (q, k, v, unknown),
        "features outermost": (q, k, v),
    }[case]
    if case == "features outermost":
        y.meta["val"] = y.meta["val"].mT.contiguous().mT

    check_refused(b, y, MALFORMED[case])


@pytest.mark.parametrize("isa", ["portable", "avx2", "amx"])
def test_it_needs_vectors_of_8(isa: str) -> None:
    b = Attention()
    program = b.done(b.call(SDPA, *b.operands()), stage=OptimizedGraph)

    found = calls(lowered(program, target=Target.for_testing(isa=isa)))

    assert len(found) == (isa != "portable")


def test_it_needs_own_kernels() -> None:
    b = Attention()
    program = b.done(b.call(SDPA, *b.operands()), stage=OptimizedGraph)

    assert not calls(lowered(program, KernelLibrary(available=False, reason="no compiler")))
