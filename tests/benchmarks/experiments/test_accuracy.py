"""The network on digits: it learns, quantizing costs little, and compiling costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from qfuse.ir.errors import OptionsError
from qfuse.options import BuiltinBackend
from qfuse_bench.experiments.accuracy import AccuracyOptions, _times, run_accuracy
from qfuse_bench.workloads.digits import DigitsNet, Images, predict, read_digits, train

# From torch's own code, when a graph that torch.export made is copied.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def test_digits_are_images_with_labels() -> None:
    seen, unseen = read_digits()
    assert (len(seen), len(unseen)) == (1297, 500)
    assert seen.pixels.shape == (1297, 1, 8, 8)
    assert [float(bound) for bound in seen.pixels.aminmax()] == [-1, 1]
    assert set(unseen.labels.tolist()) == set(range(10))


def test_training_repeats_itself_and_leaves_the_generator_alone() -> None:
    seen, _ = read_digits()
    before = torch.random.get_rng_state()
    first, second = (train(seen, 3).state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = train(seen, 3, seed=1).state_dict()
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_an_untrained_network_guesses() -> None:
    _, unseen = read_digits()
    torch.manual_seed(0)
    right = (predict(DigitsNet().eval(), unseen) == unseen.labels).float().mean()
    assert right < 0.3


@pytest.mark.thorough
def test_quantizing_costs_little_and_compiling_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: accuracy -->\n<!-- end: accuracy -->\n")
    options = AccuracyOptions(steps=150, backend=BuiltinBackend.EAGER, rounds=0, page=page)
    results = run_accuracy(options, Console(quiet=True))
    plain, quantized, compiled = results.rows

    assert plain.right / plain.images > 0.85
    assert plain.like_float == plain.images
    assert abs(quantized.right - plain.right) / plain.images < 0.03
    assert results.changed <= 2
    assert abs(compiled.right - quantized.right) <= results.changed
    assert results.report.rolled_back == ()
    assert [row.milliseconds for row in results.rows] == ["-", "-", "-"]
    assert f"| int8, PT2E, qfuse | {compiled.right / compiled.images:.2%} |" in page.read_text()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (AccuracyOptions(steps=0), "0 steps train nothing"),
        (AccuracyOptions(rounds=3), "3 rounds are too few"),
        (AccuracyOptions(batch=0), "0 images cannot be timed"),
    ],
)
def test_numbers_that_are_too_small_are_refused(options: AccuracyOptions, complaint: str) -> None:
    with pytest.raises(OptionsError, match=complaint):
        run_accuracy(options, Console(quiet=True))


def test_models_are_timed_on_a_part_of_the_images() -> None:
    _, unseen = read_digits()
    model = DigitsNet().eval()
    seen: list[tuple[int, ...]] = []

    def call(images: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(images.shape))
        return predict(model, Images(images, unseen.labels))

    found = _times({"net": call}, unseen.part(0, 3), 15)
    assert len(found["net"].rounds) == 15
    assert found["net"].median > 0
    assert set(seen) == {(3, 1, 8, 8)}
    assert _times({"net": call}, unseen, 0) == {}
