"""What is compared computes the same."""

from __future__ import annotations

import pytest
import torch

from qfuse.bench.kernels import FAMILIES, Shape, run
from qfuse.bench.measure import LEAST_ROUNDS
from qfuse.kernels import load


@pytest.fixture(autouse=True)
def _kernels() -> None:
    library = load()
    if not library.available:
        pytest.skip(library.reason)


# The peers round: bfloat16 weights after their scale, and int8pack_mm does not add the bias.
@pytest.mark.parametrize(("name", "tolerance"), [("w8a16", 0.03), ("w8a32", 1e-5)])
def test_weight_only_contenders_agree(name: str, tolerance: float) -> None:
    results = {key: f().float() for key, f in FAMILIES[name].contenders(Shape(5, 64, 128)).items()}

    torch.testing.assert_close(
        results["qfuse"], results["linear"], atol=tolerance * 10, rtol=tolerance
    )


def test_int8_contenders_agree() -> None:
    results = {key: f() for key, f in FAMILIES["w8a8"].contenders(Shape(5, 64, 128)).items()}

    torch.testing.assert_close(results["per token"], results["_int_mm"])
    torch.testing.assert_close(results["u8"], results["qlinear u8"])
    torch.testing.assert_close(results["to bf16"], results["per token"].bfloat16())
    torch.testing.assert_close(
        results["gelu"], torch.nn.functional.gelu(results["per token"]), atol=1e-5, rtol=1e-5
    )
    codes = (results["per token"] * (1 / torch.tensor([0.01]))).round().clamp(-128, 127)
    assert torch.equal(results["to codes"], codes.to(torch.int8))


def test_the_table_has_a_row_per_shape_and_two_means() -> None:
    table = run(FAMILIES["w8a8"], [Shape(2, 64, 64), Shape(3, 64, 64)], LEAST_ROUNDS, 1e-4)

    assert table.row_count == 4
    assert [c.header for c in table.columns][:2] == ["M x K x N", "per token, us"]
