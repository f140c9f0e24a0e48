"""``python -m qfuse_bench.experiments.attention``: attention of floats on both kernels.

Each shape runs as torch's ``scaled_dot_product_attention`` and as the kernel that
``lower-attention`` calls, in the same interleaved rounds. Queries, keys and values are views of
projections, with heads beside features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from qfuse import kernels
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.ir.quant.spec import parse_dtype
from qfuse_bench.harness.measure import LEAST_ROUNDS, Series, TimedFunction, measure
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.stats import ratio_of_medians


class FloatDtype(StrEnum):
    """What attention computes on."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How to measure.

    Attributes:
        rounds: Interleaved rounds per shape.
        dtype: Of queries, keys, values and masks.
    """

    rounds: int = field(default=2 * LEAST_ROUNDS, metadata={"help": "rounds per shape"})
    dtype: FloatDtype = field(
        default=FloatDtype.FLOAT32, metadata={"help": "of queries, keys, values and masks"}
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A call.

    Attributes:
        batch: Sequences.
        heads: Heads of queries.
        rows: Queries of each.
        keys: Keys and values of each.
        features: Of a head.
        shared: Heads of keys; 0 is as many as of queries.
        causal: Whether a query has only the keys up to its own position.
        masked: Whether a mask is added.
    """

    batch: int
    heads: int
    rows: int
    keys: int
    features: int
    shared: int = 0
    causal: bool = False
    masked: bool = False

    def __str__(self) -> str:
        """Such as ``4 x 12 heads, 128 x 128, 64 features, mask``."""
        heads = f"{self.heads} over {self.shared}" if self.shared else f"{self.heads}"
        text = f"{self.batch} x {heads} heads, {self.rows} x {self.keys}, {self.features} features"
        return text + (", causal" if self.causal else "") + (", mask" if self.masked else "")

    def calls(self, dtype: torch.dtype = torch.float32) -> dict[str, partial[torch.Tensor]]:
        """Return the call of each kernel, on the same operands."""
        shared = self.shared or self.heads
        query, key, value = (
            torch.randn(self.batch, length, heads, self.features).to(dtype).transpose(1, 2)
            for length, heads in ((self.rows, self.heads), *[(self.keys, shared)] * 2)
        )
        mask = torch.randn(self.batch, 1, self.rows, self.keys).to(dtype) if self.masked else None
        scale = self.features**-0.5
        return {
            "torch": partial(
                F.scaled_dot_product_attention,
                query,
                key,
                value,
                mask,
                is_causal=self.causal,
                scale=scale,
                enable_gqa=bool(self.shared),
            ),
            "qfuse": partial(kernels.attention, query, key, value, mask, self.causal, scale),
        }


SHAPES: Sequence[AttentionShape] = (
    AttentionShape(16, 12, 64, 64, 32, masked=True),
    AttentionShape(4, 12, 128, 128, 64, masked=True),
    AttentionShape(1, 12, 197, 197, 64),
    AttentionShape(1, 8, 1500, 1500, 64),
    AttentionShape(1, 16, 256, 256, 64, shared=8, masked=True),
    AttentionShape(1, 16, 256, 256, 64, shared=8, causal=True),
    AttentionShape(1, 8, 2048, 4096, 128),
    AttentionShape(1, 1, 1024, 1024, 64),
    AttentionShape(1, 16, 48, 2048, 64),
    AttentionShape(1, 16, 16, 256, 64),
    AttentionShape(1, 16, 8, 1024, 64),
    AttentionShape(1, 16, 1, 256, 64),
    AttentionShape(1, 16, 1, 2048, 64, masked=True),
    AttentionShape(1, 32, 1, 2048, 128, shared=8),
    AttentionShape(1, 4, 16, 16, 16),
)
"""Those of MiniLM, BERT, ViT, the encoder of Whisper and Llama, longer, smaller, of one token."""


def run_attention(
    options: AttentionOptions, console: Console, shapes: Sequence[AttentionShape] = SHAPES
) -> list[dict[str, Series]]:
    """Measure every shape, print a table, and return the times of both kernels.

    Raises:
        OptionsError: There are no rounds, or no kernels of qfuse.
    """
    if options.rounds < 1:
        raise OptionsError(f"{options.rounds} rounds cannot be measured", fix="ask for at least 1")
    library = kernels.load()
    if not library.available:
        raise OptionsError(f"there are no kernels of qfuse: {library.reason}")
    dtype = parse_dtype(options.dtype)
    with watching(console, len(shapes)) as watch, torch.inference_mode():
        times = []
        for shape in shapes:
            watch.say(str(shape))
            calls = {name: TimedFunction(call) for name, call in shape.calls(dtype).items()}
            times.append(measure(calls, options.rounds))
            watch.advance()
    console.print(_table(shapes, times, f"{options.dtype}, {library.default}"))
    return times


def _table(
    shapes: Sequence[AttentionShape], times: Sequence[dict[str, Series]], what: str
) -> Table:
    title = f"attention in {what}, {torch.get_num_threads()} threads"
    table = Table(title=title, title_justify="left")
    table.add_column("queries x keys")
    for column in ("torch, ms", "qfuse, ms", "ratio"):
        table.add_column(column, justify="right")
    for shape, both in zip(shapes, times, strict=True):
        ratio = ratio_of_medians(both["qfuse"].rounds, both["torch"].rounds)
        medians = (f"{both[name].median * 1e3:.3f}" for name in ("torch", "qfuse"))
        interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        table.add_row(str(shape), *medians, interval)
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(AttentionOptions)
def main(**given: Any) -> None:
    """Measure what qfuse's kernel of attention gains over torch's."""
    with exit_on_error():
        run_attention(AttentionOptions(**given), Console())


if __name__ == "__main__":
    main()
