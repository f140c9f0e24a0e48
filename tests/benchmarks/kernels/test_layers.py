"""The benchmark of convolution layers: the contenders compute the same, and rows are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse_bench.kernels.layers import LAYERS, Layer, LayerOptions, contenders, run_layers

SMALL = (Layer("net", 9, 8, 16, 3, 2), Layer("net", 6, 8, 8, 3, 1, 8), Layer("net", 5, 3, 4, 1))

pytestmark = pytest.mark.own_kernels


@pytest.mark.isa("vnni")  # Without it oneDNN saturates.
@pytest.mark.parametrize("layer", SMALL, ids=str)
def test_both_convolutions_agree(layer: Layer) -> None:
    made = contenders(layer)
    ours, theirs = made["qfuse"](), made["qconv2d"]()

    assert ours.shape == theirs.shape == (1, layer.out, *[-(-layer.size // layer.stride)] * 2)
    # Scales and bias are applied in another order, so a value near a tie may round the other way.
    assert int((ours.int() - theirs.int()).abs().max()) <= 1
    assert int(ours.max()) > int(ours.min()) + 2


def test_the_linear_is_the_same_product() -> None:
    layer = SMALL[0]

    assert contenders(layer)["linear"]().numel() * layer.depth == layer.products
    assert layer.products == 25 * 16 * 8 * 9


def test_rows_are_shown_and_written(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("<!-- begin: layers -->\n<!-- end: layers -->\n", encoding="utf-8")
    console = Console(record=True, width=160)
    before = torch.get_num_threads()
    run_layers(LayerOptions(patience=0, json=file, page=page, threads=1), console, SMALL)

    assert torch.get_num_threads() == before
    rows = json.loads(file.read_text())["layers"]
    assert [len(row["seconds"]) for row in rows] == [3, 2, 3]
    for layer in SMALL:
        assert str(layer) in console.export_text(clear=False)
        assert f"| net | {layer} | " in page.read_text()


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(OptionsError, match="cannot be measured"):
        run_layers(LayerOptions(rounds=2))


def test_every_layer_keeps_its_size_at_stride_one() -> None:
    assert all(layer.kernel % 2 for layer in LAYERS)
    assert len(set(LAYERS)) == len(LAYERS)
