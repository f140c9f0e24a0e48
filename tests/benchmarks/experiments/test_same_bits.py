"""The bits that an engine gives under each limit are counted right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.bench.results import SETTING

import qfuse
from qfuse.ir.errors import OptionsError
from qfuse.saving import digest_of
from qfuse.targets import Target
from qfuse_bench.experiments.same_bits import (
    SameBitsOptions,
    compare,
    load_saved,
)
from qfuse_bench.report.markdown import render

FLOAT = [torch.tensor([3.0, 4.0, 0.0, 0.0])]
BEST = [torch.tensor([3.0, 4.0, 0.0, 0.5])]
OTHER = [torch.tensor([3.0, 4.5, -0.0, 0.5])]


def test_each_limit_is_compared_with_the_first() -> None:
    best, same, other, none = compare(
        "engine", {"all": BEST, "less": list(BEST), "least": OTHER, "no": "it died"}, FLOAT
    )

    assert best.sha256 == same.sha256 == digest_of(BEST)
    assert (best.different, same.different, best.deviation) == (0, 0, 0.0)
    # Zeros of two signs are equal, and other bits.
    assert (other.different, other.numbers) == (2, 4)
    assert other.deviation == pytest.approx(0.5 / (25.25 / 4) ** 0.5)
    assert best.sqnr == pytest.approx(20.0)
    assert none.failed == "it died"


def test_the_page_has_a_row_per_limit() -> None:
    rows = compare("engine", {"all": BEST, "least": OTHER, "no": "it died"}, FLOAT)
    text = render("same-bits", rows=rows, setting=SETTING, options=SameBitsOptions())

    lines = [line for line in text.splitlines() if line.startswith("| engine |")][1:]
    assert lines[0].endswith("| 0 of 4 | 0 | 20.0 dB |")
    assert lines[1].endswith("| 2 of 4 | 2.0e-01 | 17.0 dB |")
    assert lines[2] == "| engine | no | it died | | | |"


def test_a_saved_model_is_loaded(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 4).eval(), torch.ones(1, 4)
    options = {"backend": "eager", "own_kernels": False}
    qfuse.compile(model, (x,), target=Target.for_testing(), options=options).save(tmp_path / "m")

    subject = load_saved({"path": str(tmp_path / "m")}, ((x,), {}))
    assert torch.equal(subject.call(x), model(x))


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(OptionsError, match="'tvm' is not a peer"):
        SameBitsOptions(engines=("tvm",))
