"""The multiply-adds of every kind of product, as the report counts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.report.advice.models import SIZE, Recurrent, sequences
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

import qfuse
from qfuse.ir.events import Estimated
from qfuse.targets import Target

Forward = Callable[..., torch.Tensor]


class Call(nn.Module):
    """A model of one function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._forward(*args)


def products(model: nn.Module, *inputs: torch.Tensor, dynamic: object = None) -> list[Estimated]:
    report = qfuse.explain(
        model.eval(), inputs, target=Target.for_testing(), dynamic_shapes=dynamic
    )
    found = [e for e in report.events if isinstance(e, Estimated)]
    return [e for e in found if e.int8_seconds is not None]


STEPS = 3 * 5
ONE_LAYER = 16 * 8 + 8 * 8


@pytest.mark.parametrize(
    ("layer", "gates", "matrices"),
    [
        (nn.LSTM(16, 8, batch_first=True), 4, ONE_LAYER),
        (nn.GRU(16, 8), 3, ONE_LAYER),
        (nn.RNN(16, 8, bidirectional=True), 1, 2 * ONE_LAYER),
        (nn.RNN(16, 8, nonlinearity="relu", num_layers=2), 1, ONE_LAYER + 2 * 8 * 8),
    ],
    ids=["lstm", "gru", "both directions", "two layers"],
)
def test_multiply_adds_of_recurrent_layers(layer: nn.Module, gates: int, matrices: int) -> None:
    (product,) = products(Call(lambda x: layer(x)[0]), torch.randn(3, 5, 16))
    assert product.multiply_adds == STEPS * gates * matrices


def test_a_projected_state_is_multiplied_by_its_matrix_too() -> None:
    layer = nn.LSTM(16, 8, proj_size=4)
    (product,) = products(Call(lambda x: layer(x)[0]), torch.randn(3, 5, 16))
    assert product.multiply_adds == STEPS * (4 * 8 * (16 + 4) + 4 * 8)


def test_multiply_adds_of_a_recurrent_layer_of_onednn() -> None:
    lstm = nn.LSTM(16, 8)
    lstm_mode = 2

    def forward(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        options: tuple[object, ...] = (False, [], lstm_mode, 8, 1, True, False, False, False)
        weights = lstm.all_weights[0]
        result: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, *options)[
            0
        ]
        return result

    (product,) = products(Call(forward), torch.randn(3, 5, 16), torch.zeros(1, 5, 8))
    assert product.multiply_adds == STEPS * 4 * ONE_LAYER


def test_the_share_counts_a_recurrent_layer_in_float() -> None:
    model = nn.Sequential(Recurrent(as_linears=False), nn.Linear(SIZE, SIZE)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    report = qfuse.explain(model, sequences(), target=Target.for_testing())
    assert report.work is not None
    assert (report.work.quantized_products, report.work.products) == (1, 2)
    assert report.work.share == pytest.approx(1 / 3)
    # The list of its weights, which torch.export mentions, is nothing that a user assigned.
    assert [action.tried for action in report.actions] == ["aten.rnn_tanh.input"]


X = (2, 8, 10, 10)
IMAGE = 2 * 10 * 10


@pytest.mark.parametrize(
    ("model", "shapes", "expected"),
    [
        (nn.Linear(16, 24), [(3, 5, 16)], 3 * 5 * 16 * 24),
        (nn.Conv2d(8, 12, 3, padding=1), [X], IMAGE * 12 * 8 * 9),
        (nn.Conv2d(8, 12, 3, padding=1, groups=4), [X], IMAGE * 12 * 2 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8), [X], 2 * 25 * 8 * 9),
        (nn.ConvTranspose2d(8, 12, 2, stride=2), [X], IMAGE * 8 * 12 * 4),
        (Call(torch.matmul), [(4, 3, 5, 6), (4, 1, 6, 7)], 4 * 3 * 5 * 6 * 7),
        (
            Call(F.scaled_dot_product_attention),
            [(2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8)],
            2 * (2 * 4 * 6 * 10 * 8),
        ),
    ],
    ids=["linear", "convolution", "groups", "depthwise", "transposed", "matmul", "attention"],
)
def test_multiply_adds(model: nn.Module, shapes: list[tuple[int, ...]], expected: int) -> None:
    (product,) = products(model, *(torch.randn(shape) for shape in shapes))

    assert product.multiply_adds == expected
    assert product.float_seconds > 0


def test_a_dynamic_size_counts_as_it_was_traced() -> None:
    batch = {"input": {0: torch.export.Dim("batch", min=1, max=64)}}
    (product,) = products(nn.Linear(16, 24), torch.randn(7, 16), dynamic=batch)

    assert product.multiply_adds == 7 * 16 * 24


def test_the_same_operand_twice_is_attention_too() -> None:
    model = Call(lambda x: F.scaled_dot_product_attention(x, x, x))
    (product,) = products(model, torch.randn(2, 4, 6, 8))

    assert product.multiply_adds == 2 * (2 * 4 * 6 * 6 * 8)


def test_a_large_product_is_faster_on_integers() -> None:
    (large,) = products(nn.Linear(512, 512), torch.randn(128, 512))

    assert large.int8_seconds is not None
    assert large.int8_seconds < large.float_seconds


def test_operands_are_traced_up_to_the_next_product() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    first, second = products(model, torch.randn(4, 16))

    assert first.upstream == ()
    assert any("tanh" in name for name in second.upstream)
    assert first.place.node not in second.upstream
