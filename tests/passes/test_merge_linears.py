"""``qfuse.passes.MergeLinears`` on graphs of all origins."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.graphs.raw_fx import (
    K,
    Siblings,
    assert_same_bits,
    bits_of,
    check_values,
    exported,
    ops_of,
    own_memory,
)
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import MissCode
from qfuse.passes import MergeLinears
from qfuse.passes._torch_api import mode_of

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def as_exported(model: nn.Module, x: torch.Tensor) -> GraphModule:
    return torch.export.export(model, (x,)).module()


def as_decomposed(model: nn.Module, x: torch.Tensor) -> GraphModule:
    return exported(model, x)


def as_traced(model: nn.Module, x: torch.Tensor) -> GraphModule:
    return make_fx(model)(x)


def as_traced_with_symbols(model: nn.Module, x: torch.Tensor) -> GraphModule:
    return make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)


ORIGINS = [as_exported, as_decomposed, as_traced, as_traced_with_symbols]


@pytest.mark.numeric
@pytest.mark.parametrize("make", ORIGINS)
@torch.no_grad()
def test_siblings_become_one_and_the_rest_stays(
    make: Callable[[nn.Module, torch.Tensor], GraphModule],
) -> None:
    x = torch.randn(3, 2, K)
    module = make(Siblings().eval(), x)
    before, calls = bits_of(module, [x]), ops_of(module)
    nodes = {node.name: node.target for node in module.graph.nodes}
    expected = module(x)
    outcome = MergeLinears()(module)

    assert (outcome.modified, outcome.graph_module is module) == (True, True)
    assert outcome.fired == {"merge-linears": 1}
    after = ops_of(module)
    assert sum(after[name] for name in ("aten.linear", "aten.addmm")) == 1
    kept = ("aten.sigmoid", "aten.relu")
    assert {name: calls[name] for name in kept} == {name: after[name] for name in kept}
    same = [n for n in module.graph.nodes if nodes.get(n.name) == n.target]
    assert len(same) >= 5
    assert_same_bits(before, bits_of(module, [x]), strides=False)
    check_values(module, x)
    result = module(x)
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)
    for old, new in zip(pytree.tree_leaves(expected), pytree.tree_leaves(result), strict=True):
        assert (old.shape, old.stride()) == (new.shape, new.stride())
    own_memory(result)
    assert module.graph.owning_module is module
    assert [n for n in module.graph.nodes if "val" not in n.meta and n.op == "call_function"] == []


def test_golden_what_people_read() -> None:
    module = exported(Siblings(), torch.randn(3, K))
    outcome = MergeLinears()(module)

    assert_expected_inline(
        str(outcome),
        """\
fired: merge-linears 1
  merge-linears: aten.linear (q) + aten.linear (k) + aten.linear (v) (6 + 4 + 2)
no longer used: k.weight, q.bias, q.weight, v.bias, v.weight""",
    )
    assert_expected_inline(
        module.code.strip(),
        """\
def forward(self, x):
    x, = fx_pytree.tree_flatten_spec(([x], {}), self._in_spec)
    _guards_fn = self._guards_fn(x);  _guards_fn = None
    view = torch.ops.aten.view.default(x, [-1, 8]);  x = None
    sigmoid = torch.ops.aten.sigmoid.default(view);  view = None
    permute = torch.ops.aten.permute.default(sigmoid, [1, 0])
    mm = torch.ops.aten.mm.default(permute, sigmoid);  permute = None
    view_1 = torch.ops.aten.view.default(mm, [-1]);  mm = None
    q_weight_k_weight_v_weight = self.q_weight_k_weight_v_weight
    q_bias_v_bias = self.q_bias_v_bias
    permute_default = torch.ops.aten.permute.default(q_weight_k_weight_v_weight, [1, 0]);  q_weight_k_weight_v_weight = None
    addmm_default = torch.ops.aten.addmm.default(q_bias_v_bias, sigmoid, permute_default);  q_bias_v_bias = sigmoid = permute_default = None
    split_with_sizes_default = torch.ops.aten.split_with_sizes.default(addmm_default, [6, 4, 2], 1);  addmm_default = None
    getitem = split_with_sizes_default[0]
    getitem_1 = split_with_sizes_default[1]
    clone_default = torch.ops.aten.clone.default(getitem_1);  getitem_1 = None
    getitem_2 = split_with_sizes_default[2];  split_with_sizes_default = None
    clone_default_1 = torch.ops.aten.clone.default(getitem_2);  getitem_2 = None
    relu = torch.ops.aten.relu.default(getitem);  getitem = None
    reshape_default = torch.ops.aten.reshape.default(clone_default_1, [6]);  clone_default_1 = None
    return pytree.tree_unflatten((relu, clone_default, reshape_default, view_1), self._out_spec)""",
    )


@torch.no_grad()
def test_a_second_time_there_is_nothing_to_do() -> None:
    module = exported(Siblings(), torch.randn(3, K))
    MergeLinears()(module)
    graph, text = module.graph, module.code
    outcome = MergeLinears()(module)

    assert (outcome.modified, outcome.fired, outcome.unused) == (False, {}, ())
    assert module.graph is graph
    assert module.code == text


@torch.no_grad()
def test_a_merged_module_is_copied_and_stored_like_any_other() -> None:
    x = torch.randn(3, K)
    module = make_fx(Siblings().eval())(x)
    MergeLinears()(module)
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(pytree.tree_leaves(expected), pytree.tree_leaves(other(x)))
        assert MergeLinears()(other, [x]).modified is False


def test_refuses_weights_of_the_caller() -> None:
    def call(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> list[torch.Tensor]:
        return [nn.functional.linear(x, w), nn.functional.linear(x, u)]

    x, w = torch.randn(3, K), torch.randn(4, K)
    module = make_fx(call)(x, w, torch.randn(5, K))
    graph = module.graph
    outcome = MergeLinears()(module)

    assert outcome.modified is False
    assert module.graph is graph


class Chained(nn.Module):
    """A linear whose input is another's output, of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(K, K) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Chain."""
        first = self.a(x)
        return first, self.b(first + x), self.c(first + x)


@pytest.mark.numeric
@torch.no_grad()
def test_siblings_that_depend_on_each_other_stay_apart() -> None:
    x = torch.randn(3, K)
    module = exported(Chained(), x)
    before = bits_of(module, [x])
    outcome = MergeLinears()(module)

    assert outcome.fired == {}
    assert outcome.report.fired == {}
    assert_same_bits(before, bits_of(module, [x]))


class Tied(nn.Module):
    """One weight for two inputs, and twice for one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, 4, bias=False), nn.Linear(K, 4, bias=False)
        self.c = nn.Linear(K, 4, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Use all."""
        h = torch.relu(x)
        return self.a(x) + 1, self.b(x) + 1, self.c(x) + 2, self.c(h) + 1


@pytest.mark.numeric
@torch.no_grad()
def test_tied_weights_are_held_once() -> None:
    x = torch.randn(3, K)
    module = exported(Tied(), x)
    before = bits_of(module, [x])
    MergeLinears()(module)

    assert_same_bits(before, bits_of(module, [x]))


@torch.no_grad()
def test_sizes_that_vary_still_do() -> None:
    x = torch.randn(3, 2, K)
    rows = Dim("rows", min=2, max=64)
    module = exported(Siblings(), x, dynamic_shapes={"x": {0: rows}})
    MergeLinears()(module)

    modes = {
        id(mode_of(t))
        for node in module.graph.nodes
        for t in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(t, torch.Tensor)
    }
    assert len(modes) == 1
    (split,) = module.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default)
    assert not isinstance(split.meta["val"][0].shape[0], int)
    for size in (2, 7):
        new = torch.randn(size, 2, K)
        assert module(new)["v"].shape == (size * 4,)
        check_values(module, new)


def test_new_nodes_say_where_they_come_from() -> None:
    module = exported(Siblings(), torch.randn(3, K))
    old = {node.name: dict(node.meta) for node in module.graph.nodes}
    MergeLinears()(module)
    made = [node for node in module.graph.nodes if "qfuse_rule" in node.meta]

    assert {n.target for n in made if n.op == "call_function"} >= {
        aten.split_with_sizes.default,
        operator.getitem,
    }
    for node in made:
        if node.op == "call_function":
            assert "raw_fx.py" in node.meta["stack_trace"]
            assert node.meta["nn_module_stack"]
    kept = [node for node in module.graph.nodes if "qfuse_rule" not in node.meta]
    assert len(kept) > 5
    for node in kept:
        assert node.meta == old[node.name]


@torch.no_grad()
def test_a_float_graph_keeps_its_unused_weights_for_whoever_reads_them() -> None:
    model = Siblings()
    module = exported(model, torch.randn(3, K))
    outcome = MergeLinears()(module)

    assert outcome.unused == ("k.weight", "q.bias", "q.weight", "v.bias", "v.weight")
    assert all(name in dict(module.named_parameters()) for name in outcome.unused)


def test_values_that_are_missing_are_made_from_example_inputs() -> None:
    x = torch.randn(3, K)
    module = exported(Siblings(), x)
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    outcome = MergeLinears()(module, [x])

    assert outcome.modified
    check_values(module, x)


@torch.no_grad()
def test_a_cost_model_may_decline() -> None:
    model = nn.ModuleList([nn.Linear(K, 8), nn.Linear(K, 8)])
    module = make_fx(lambda x: [linear(x) for linear in model])(torch.randn(4096, K))
    outcome = MergeLinears(cost=CostModel(CostProfile.pinned()))(module)

    assert outcome.modified is False
    assert {miss.code for miss in outcome.misses} == {MissCode.PROFIT}


class GluOrder(nn.Module):
    """Casts that torch.export checks: a check reads what would be merged, and what stays."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, 4, bias=False), nn.Linear(K, 4, bias=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Cast the weights in the graph."""
        h = torch.sigmoid(x).to(torch.float32)
        weights = (linear.weight.to(torch.float32) for linear in (self.a, self.b))
        return [torch.relu(h @ w.t()) for w in weights]


@pytest.mark.numeric
@torch.no_grad()
def test_checks_of_types_stay_with_what_stays() -> None:
    check = aten._assert_tensor_metadata.default
    x = torch.randn(3, K)
    module = exported(GluOrder(), x)
    before = bits_of(module, [x])
    assert len(module.graph.find_nodes(op="call_function", target=check)) == 3
    outcome = MergeLinears()(module)

    assert outcome.fired == {"merge-linears": 1}
    (left,) = module.graph.find_nodes(op="call_function", target=check)
    assert left.args[0].target is aten.sigmoid.default
    assert_same_bits(before, bits_of(module, [x]))


def test_a_constant_name_that_is_taken_is_not_taken_again() -> None:
    module = exported(Siblings(), torch.randn(3, K))
    module.register_buffer("q_bias_v_bias", torch.ones(1))
    MergeLinears()(module)

    assert torch.equal(module.get_buffer("q_bias_v_bias"), torch.ones(1))
    assert module(torch.randn(3, K))["v"].shape == (6,)


def test_inputs_that_are_no_tensors_stay_where_they_are() -> None:
    def call(x: torch.Tensor, count: int, flag: bool) -> list[torch.Tensor]:
        return [linear(x) + count if flag else linear(x) for linear in model]

    model = nn.ModuleList([nn.Linear(K, 4), nn.Linear(K, 4)])
    module = make_fx(call, tracing_mode="real")(torch.randn(3, K), 2, True)
    expected = module(torch.ones(3, K), 2, True)
    assert MergeLinears()(module).modified

    for old, new in zip(expected, module(torch.ones(3, K), 2, True), strict=True):
        assert torch.allclose(old, new, atol=1e-6)
