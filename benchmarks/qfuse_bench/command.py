"""``qfuse bench``, a plugin of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qfuse.cli.loading import load_quantized
from qfuse.cli.options import options_of
from qfuse.cli.saved import bench_saved
from qfuse.ir.errors import OptionsError
from qfuse.saving import is_model_file
from qfuse.zoo import recipes
from qfuse_bench.experiments.merge_sites import ModelSites, SiteOptions, run_sites
from qfuse_bench.experiments.models import BenchOptions, run_bench
from qfuse_bench.harness.machine_class import restart_with_limits


@click.command("bench")
@click.argument("model", required=False)
@click.option("--sites", "sites", is_flag=True, help="where linears are merged: gain and measured")
@click.option(
    "--quantize", type=click.Choice(recipes.names()), help="quantize MODEL first (--sites)"
)
@click.option(
    "--size", "sizes", multiple=True, metavar="NAME=VALUE", help="a size of MODEL (--sites)"
)
@options_of(BenchOptions)
def bench_command(
    model: str | None, sites: bool, quantize: str | None, sizes: tuple[str, ...], **given: Any
) -> None:
    """Measure qfuse against Inductor and torchao on the same quantized models.

    With MODEL, the file of a compiled model: measure its latency (only --threads applies).

    With --sites: measure the linears that may be merged, in built-in sizes or in MODEL (a zoo name,
    module:factory, or a .pt2 file), separate and merged, and check the decisions of the cost model.
    """
    options = BenchOptions(**given)
    restart_with_limits(options.isa)
    if model is not None and is_model_file(Path(model)):
        bench_saved(Path(model), threads=options.threads)
    elif sites:
        _bench_sites(model, quantize, sizes, options)
    elif model is not None or quantize is not None or sizes:
        raise OptionsError(
            "a model of your own is measured by its merge sites only",
            fix="add --sites; the built-in models are chosen by --models and --recipes",
        )
    else:
        run_bench(options)


def _bench_sites(
    spec: str | None, quantize: str | None, sizes: tuple[str, ...], options: BenchOptions
) -> None:
    """Measure the merge sites of a model, or the built-in ones."""
    if any(
        (
            options.models,
            options.recipes,
            options.tuned,
            options.goals,
            options.convnets,
            options.floats,
        )
    ):
        raise OptionsError(
            "--models, --recipes, --floats, --tuned, --goals and --convnets are not for --sites",
            fix="name one model before --sites, and quantize it by --quantize",
        )
    asked = SiteOptions(
        rounds=options.rounds,
        threads=options.threads,
        patience=options.patience,
        quick=options.quick,
        json=options.json,
        page=options.page,
    )
    if spec is None:
        run_sites(asked)
        return
    made = load_quantized(spec, quantize, None, sizes)
    run_sites(asked, model=ModelSites(spec, made.model, made.args, dict(made.kwargs)))
