from __future__ import annotations

import pytest
import torch
from tests.support.sources.dialects import (
    DIALECTS,
    Source,
    assert_same_bits,
    codes,
    fired,
    only_miss,
    ops_of,
    scales,
)

from qfuse.ir.errors import NormalizeError
from qfuse.ir.events import Fired, Noted
from qfuse.ir.graph.stage_graph import MODULE_META, REFUSED_META, SOURCE_META, NormalGraph
from qfuse.normalize import normalize
from qfuse.normalize.importers.dialect import Dialect
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.context import RewriteContext

aten = torch.ops.aten
d = torch.ops.quantized_decomposed


@torch.library.custom_op("qfuse_test_made_up::strange", mutates_args=())
def strange(x: torch.Tensor) -> torch.Tensor:
    return x * 2


strange.register_fake(torch.empty_like)
torch.library.define("qfuse_test_made_up::kernelless", "(Tensor x) -> Tensor")
torch.library.register_fake("qfuse_test_made_up::kernelless", torch.empty_like)
MADE_UP = Dialect(
    "made-up",
    list,
    frozenset({"qfuse_test_made_up"}),
    {"qfuse_test_made_up::strange": "nobody knows what it means"},
)


def test_the_result_is_a_normal_graph_on_the_same_module() -> None:
    source = Source()
    program = source.done(source.b.call(aten.relu.default, source.arg(torch.randn(3, 8))))
    normal = normalize(program)

    assert isinstance(normal, NormalGraph)
    assert normal.module is program.module
    assert normal.signature is program.signature
    assert normal.log is program.log


def test_what_nothing_reads_is_swept() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    weight = source.b.const("weight", torch.randn(4, 8))
    source.b.call(aten.neg.default, source.b.call(aten.t.default, weight))
    source.b.call(aten.sym_size.int, x, 0)
    normal = normalize(source.done(source.b.call(aten.relu.default, x)))

    assert [n.op for n in normal.graph.nodes] == ["placeholder", "call_function", "output"]


def test_unused_inputs_and_assertions_stay() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    flag = source.arg(torch.tensor(True))
    source.b.call(aten._assert_async.msg, flag, "no")
    normal = normalize(source.done(source.b.call(aten.relu.default, x)))

    assert [n.op for n in normal.graph.nodes].count("placeholder") == 2
    assert ops_of(normal, "aten") == ["_assert_async", "relu"]


def test_weights_stay_quantized() -> None:
    source = Source()
    w = source.b.const("w", torch.randint(-8, 8, (4, 8), dtype=torch.int8))
    s = source.b.const("s", scales((4,)))
    y = source.b.call(d.dequantize_per_channel.default, w, s, None, 0, -8, 7, torch.int8)
    normal = normalize(source.done(y))

    assert ops_of(normal) == ["dequantize"]
    assert normal.module.get_buffer("w").dtype is torch.int8


@pytest.mark.numeric
def test_an_unknown_op_stays_works_and_is_named() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    y = source.b.call(torch.ops.qfuse_test_made_up.strange.default, x)
    y.meta[MODULE_META] = "net.layer"
    normal = assert_same_bits(source, y, dialects=(*DIALECTS, MADE_UP))

    assert ops_of(normal, "qfuse_test_made_up") == ["strange"]
    (note,) = normal.log.of(Noted)
    assert note.warn
    assert note.stage == "normalize"
    (strange,) = (n for n in normal.graph.nodes if REFUSED_META in n.meta)
    assert strange.meta[REFUSED_META] == "no dialect translates: nobody knows what it means"
    assert note.text == "qfuse_test_made_up.strange stays as it is: nobody knows what it means"
    assert note.place is not None
    assert note.place.module == "net.layer"


def test_an_op_of_a_quantized_namespace_is_named_even_if_no_dialect_owns_it() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    s, z = source.b.const("s", scales((3,))), source.b.const("z", torch.zeros(3).int())
    y = source.b.call(d.fake_quant_per_channel.default, x, s, z, 0, -128, 127)
    normal = normalize(source.done(y), dialects=())

    (note,) = normal.log.of(Noted)
    assert note.text.endswith("fake_quant_per_channel stays as it is: no dialect supports it")
    source = Source()
    x = source.arg(torch.randn(3, 8))
    s, z = source.b.const("s", scales((3,))), source.b.const("z", torch.zeros(3).int())
    y = source.b.call(d.fake_quant_per_channel.default, x, s, z, 0, -128, 127)
    (note,) = normalize(source.done(y)).log.of(Noted)
    assert note.text.endswith("it is an op of training, which keeps its values in floating point")


def test_an_op_without_a_kernel_is_an_error_at_the_users_line() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    y = source.b.call(torch.ops.qfuse_test_made_up.kernelless.default, x)
    y.meta[SOURCE_META], y.meta[MODULE_META] = "model.py:7: y = self.fc(x)", "net.fc"

    with pytest.raises(NormalizeError, match="has a schema but no kernel here") as caught:
        normalize(source.done(y), dialects=(MADE_UP,))
    assert caught.value.where is not None
    assert "net.fc, model.py:7: y = self.fc(x)" in caught.value.where
    assert caught.value.fix is not None


def test_ops_of_torchao_that_its_wheel_has_no_kernel_for_are_errors() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    op = torch.ops.torchao.float8_linear_cpu.default
    y = source.b.call(aten.relu.default, x)
    one = source.b.const("one", torch.ones(1))
    y.target, y.args = op, (x, one, x, one, None, torch.float32)

    with pytest.raises(NormalizeError, match="float8_linear_cpu"):
        normalize(source.done(y))


def test_an_op_on_the_meta_device_is_not_asked_for_a_kernel() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    y = source.b.call(torch.ops.qfuse_test_made_up.kernelless.default, x)
    y.meta["val"] = torch.empty(3, 8, device="meta")

    normal = normalize(source.done(y), dialects=(MADE_UP,))
    assert ops_of(normal, "qfuse_test_made_up") == ["kernelless"]


@pytest.mark.numeric
@pytest.mark.parametrize("fuel", [0, 1, 2, 3])
def test_a_gate_that_stops_half_way_leaves_a_graph_that_works(fuel: int) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    pair = source.b.call(d.choose_qparams.tensor, x, 0, 255, 2**-12, torch.uint8)
    s, z = source.b.item(pair, 0), source.b.item(pair, 1)
    q = source.b.call(d.quantize_per_tensor.tensor, x, s, z, 0, 255, torch.uint8)
    y = source.b.call(d.dequantize_per_tensor.tensor, q, s, z, 0, 255, torch.uint8)
    normal = assert_same_bits(
        source, y, context=RewriteContext("stage", budget=RewriteBudget(fuel))
    )

    assert len(fired(normal)) == fuel
    assert {e.stage for e in normal.log.of(Fired)} <= {"stage"}
    assert len(normal.log.of(Noted)) == 3 - fuel


def test_later_stages_know_which_rule_refused_an_op() -> None:
    source = Source()
    q, s = source.arg(codes((4, 8), torch.int8)), source.b.const("s", scales((4,)))
    zero = source.b.const("z", torch.ones(4, dtype=torch.float64))
    y = source.b.call(d.dequantize_per_channel.default, q, s, zero, 0, -128, 127, torch.int8)
    normal = normalize(source.done(y))

    miss = only_miss(normal)
    (kept,) = (n for n in normal.graph.nodes if REFUSED_META in n.meta)
    why = f"the rule normalize-dequantize-per-channel refused: {miss.reason}"
    assert kept.meta[REFUSED_META] == why
