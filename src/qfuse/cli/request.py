"""The request of a command that takes a model: its options, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qfuse.analysis.placement.lint import note_warnings
from qfuse.api import CapturedModel, captured_model
from qfuse.cli.console import show_progress
from qfuse.cli.loading import loading_options, parse_size_options, quantize_loaded
from qfuse.cli.options import check_writable, command_fields, options_of
from qfuse.ir.errors import OptionsError
from qfuse.ir.quant.spec import parse_dtype
from qfuse.options import Check, Options, choice
from qfuse.zoo.resolve import load_model

_FLOATS = {"float32": None, "bfloat16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a ``compile`` or ``explain`` command.

    Attributes:
        model: A zoo name, ``module:factory``, or a ``.pt2`` file.
        quantize: Recipe to quantize with first, or ``None``.
        group_size: Weights per scale, or ``None`` for the recipe's default.
        sizes: Sizes of the model, as text.
        dynamic: Whether the sizes that the model declares dynamic stay dynamic.
        check: How values are checked.
        float_dtype: ``bfloat16``, or ``None`` for the model's own dtypes.
        report_json: Where to write the report as JSON; ``-`` is standard output.
        show_plan: Whether to print the lowered graph.
        verbose: Whether to print all tables of the report.
        strict: Whether a quantized op that runs in float is an error.
        options: All other options.
    """

    model: str
    quantize: str | None
    group_size: int | None
    sizes: dict[str, str]
    dynamic: bool
    check: Check
    float_dtype: str | None
    report_json: str | None
    show_plan: bool
    verbose: bool
    strict: bool
    options: Options


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that ``compile`` and ``explain`` share."""
    options = (
        loading_options,
        click.option(
            "--dynamic/--static",
            default=False,
            show_default=True,
            help="keep the sizes dynamic that the model declares so",
        ),
        click.option(
            "--float-dtype",
            type=click.Choice(list(_FLOATS)),
            default="float32",
            show_default=True,
            help="dtype of unquantized ops; bfloat16 is lossy",
        ),
        click.option("--json", "report_json", metavar="FILE", help="write the report as JSON"),
        click.option("--strict", is_flag=True, help="fail if a quantized op runs in float"),
        click.option("--verbose", is_flag=True, help="print all tables of the report"),
        options_of(Options),
    )
    # Decorators apply from the last to the first, and help lists options in the order of adding.
    for option in reversed(options):
        command = option(command)
    return command


def read_request(given: dict[str, Any], check: str) -> Request:
    """Validate all options before any slow step."""
    options = Options.of({f.name: given[f.name] for f in command_fields(Options)})
    check_writable(given["report_json"], "--json")
    return Request(
        given["model"],
        given["quantize"],
        given["group_size"],
        parse_size_options(given["sizes"]),
        given["dynamic"],
        choice(Check, check, "check"),
        _FLOATS[given["float_dtype"]],
        given["report_json"],
        given.get("show_plan", False),
        given["verbose"],
        given["strict"],
        options,
    )


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that is loaded and quantized, and how it is to be compiled.

    Attributes:
        model: The model.
        args: Positional example inputs.
        kwargs: Keyword example inputs.
        settings: The other arguments that ``compile``, ``explain`` and ``bisect`` share.
        say: Shows the current step.
        check: How values are checked.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: dict[str, Any]
    say: Callable[[str], None]
    check: Check

    def captured(
        self, *, lint: bool = False, measure: bool = False, plan: Path | None = None
    ) -> AbstractContextManager[CapturedModel]:
        """Capture the model; with ``lint``, its reports have what the lint warns of."""
        given = {**self.settings, "check": self.check.value, "measure": measure, "plan": plan}
        captured = captured_model(self.model, self.args, self.kwargs, **given)
        return _with_warnings(captured) if lint else captured


@contextmanager
def _with_warnings(
    capturing: AbstractContextManager[CapturedModel],
) -> Iterator[CapturedModel]:
    with capturing as captured:
        note_warnings(captured)
        yield captured


@contextmanager
def ready_model(request: Request) -> Iterator[ReadyModel]:
    """Load the model of a request, quantize it, and show the steps until the block is left.

    Raises:
        OptionsError: There is no such model, or an option does not fit it.
    """
    loaded = load_model(request.model, request.sizes)
    shapes = loaded.dynamic_shapes if request.dynamic else None
    if request.dynamic and loaded.dynamic_shapes is None:
        raise OptionsError(
            f"{request.model} does not declare dynamic sizes",
            fix="return them as the fourth value of a factory, as in "
            'return model, args, {}, {"x": {0: torch.export.Dim("batch", min=1, max=64)}}',
        )
    with show_progress() as say:
        if request.quantize is not None:
            say(f"quantizing with {request.quantize}")
        made = quantize_loaded(loaded, request.quantize, shapes, request.group_size)
        dtype = None if request.float_dtype is None else parse_dtype(request.float_dtype)
        settings = {
            "dynamic_shapes": shapes,
            "float_dtype": dtype,
            "options": request.options,
            "progress": say,
        }
        yield ReadyModel(*made, settings, say, request.check)
