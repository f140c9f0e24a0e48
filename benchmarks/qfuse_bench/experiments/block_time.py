"""``python -m qfuse_bench.experiments.block_time``: compiling repeated blocks once, or all as one.

Each model is compiled in two processes, as one package and with its blocks compiled once, and the
calls are timed in interleaved rounds. The answers of one package are the reference of the other, so
no difference means equal bits. The seconds of the backend are those of one compilation each, with
an empty cache of compiled code, after a small linear was compiled; in parentheses are those of
loading the saved model.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import qfuse
from qfuse import zoo
from qfuse.backends.runner import BLOCKS_VARIABLE
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.zoo import recipes
from qfuse_bench.harness.comparison import Comparison, Competitor, Entry, Verdict
from qfuse_bench.harness.machine import BackgroundLoad, Setting, prepare_machine
from qfuse_bench.harness.measure import LEAST_ROUNDS, compare
from qfuse_bench.harness.process import WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.harness.stats import Ratio
from qfuse_bench.harness.worker import Inputs, Subject
from qfuse_bench.report import format as words
from qfuse_bench.report.outputs import Outputs
from qfuse_bench.report.results import entry_values
from qfuse_bench.report.tables import ratio_text

WHOLE, BLOCKS = "one package", "blocks"
_CHOICES = {WHOLE: "off", BLOCKS: "on"}
_FACTORY = "qfuse_bench.experiments.block_time:build"
_SECTION = "blocks"
_HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """What to compile, and how often to call it.

    Attributes:
        model: A model of the zoo with layers of a hidden size.
        recipe: How it is quantized.
        layers: The numbers of layers.
        hidden: The hidden sizes.
        seq: Tokens of the input.
        rounds: Interleaved rounds per model.
        threads: OpenMP threads; 0 takes torch's default.
        patience: Seconds to wait, per model, for other programs to leave the cores.
        json: Where to write everything that was measured.
        page: A page with a section to write the table into.
    """

    model: str = field(default="llama", metadata={"help": "a model of the zoo"})
    recipe: str = field(default="w8a8-dynamic", metadata={"help": "how it is quantized"})
    layers: tuple[int, ...] = field(default=(4, 8, 16, 24, 32), metadata={"help": "layers"})
    hidden: tuple[int, ...] = field(default=(256, 1024), metadata={"help": "hidden size"})
    seq: int = field(default=64, metadata={"help": "tokens of the input"})
    rounds: int = field(default=21, metadata={"help": "interleaved rounds per model"})
    threads: int = field(default=0, metadata={"help": "threads; 0 takes torch's default"})
    patience: float = field(
        default=60.0,
        metadata={"help": "seconds to wait, per model, for other programs to be quiet"},
    )
    json: Path | None = field(
        default=None, metadata={"help": "write everything that was measured to a file"}
    )
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.rounds < LEAST_ROUNDS or self.threads < 0:
            raise OptionsError(
                f"{self.rounds} rounds with {self.threads} threads cannot be measured",
                fix=f"ask for {LEAST_ROUNDS} rounds or more, and 0 threads or more",
            )

    def sizes(self, layers: int, hidden: int) -> dict[str, int]:
        """Return the sizes of one model."""
        heads = max(1, hidden // _HEAD_WIDTH)
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": self.seq}
        if self.model == "llama":
            sizes |= {"kv_heads": max(1, heads // 2), "intermediate": hidden * 11 // 4}
        return sizes


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One model in both forms.

    Attributes:
        layers: Its layers.
        hidden: Its hidden size.
        whole: Compiled as one package.
        blocks: With its blocks compiled once.
    """

    layers: int
    hidden: int
    whole: Entry
    blocks: Entry

    @property
    def call_ratio(self) -> Ratio | None:
        """Time of a call with blocks over that of one package; ``None`` if one failed."""
        if self.whole.time is None or self.blocks.time is None:
            return None
        return compare(self.blocks.time, self.whole.time)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        pair = {"whole": entry_values(self.whole), "blocks": entry_values(self.blocks)}
        return {
            "layers": self.layers,
            "hidden": self.hidden,
            "equal_bits": self.equal_bits,
            # Bits that are equal have no noise, for which JSON has no number.
            **{name: {**values, "sqnr": None} for name, values in pair.items()},
        }

    @property
    def equal_bits(self) -> str:
        """Whether the answers are equal to the last bit."""
        found = self.blocks.sqnr
        return "-" if found is None else "yes" if found == math.inf else "no"

    @property
    def outcome(self) -> str:
        """What became of the blocks, in words."""
        return self.blocks.reason or str(self.blocks.facts["outcome"])


def build(arguments: Mapping[str, Any], example: Inputs) -> Subject:
    """Compile a model in a worker, and return it with the seconds as facts.

    Args:
        arguments: ``model``, ``sizes``, ``recipe`` and ``blocks``.
        example: The inputs to compile for.
    """
    args, kwargs = example
    built = zoo.build(arguments["model"], **arguments["sizes"])
    model = recipes.quantize(built.module, arguments["recipe"], args, kwargs).model
    folder = tempfile.TemporaryDirectory(prefix="qfuse-bench-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    os.environ[BLOCKS_VARIABLE] = arguments["blocks"]
    options = {"cache": False}
    qfuse.compile(nn.Linear(8, 8).eval(), (torch.ones(2, 8),), options=options)
    fast = qfuse.compile(model, args, kwargs, options=options)
    path = Path(folder.name, "model.qfuse")
    fast.save(path)
    begin = time.perf_counter()
    qfuse.load(path)
    loaded = time.perf_counter() - begin
    path.unlink()
    said = [note.text for note in fast.report.notes if note.stage == "backends"]
    facts = {
        "seconds": fast.report.facts.compile_seconds,
        "load_seconds": loaded,
        "outcome": next((text for text in said if text.startswith("the graph ")), "one package"),
    }
    # The folder lives as long as what was compiled into it.
    return Subject(fast, facts=facts, state=folder)


def run_block_time(options: BlockOptions, console: Console) -> list[BlockRow]:
    """Measure, show a table, and write the requested files."""
    outputs = Outputs(_SECTION, options.page, options.json)
    threads = options.threads or torch.get_num_threads()
    setting = Setting.here(threads)
    rows, others = list[BlockRow](), 0.0
    models = [(layers, hidden) for hidden in options.hidden for layers in options.layers]
    with watching(console, len(models) * (2 + options.rounds)) as watch:
        watch.say("building kernels and measuring speeds, once per machine")
        prepare_machine(threads)
        for layers, hidden in models:
            row, load = _measured(options, layers, hidden, threads, watch)
            rows.append(row)
            others = max(others, load)
            found = [row.to_dict() for row in rows]
            data = {"setting": asdict(setting), "others": others, "rows": found}
            # Deep models take minutes: what is measured is kept.
            outputs.write(
                data,
                rows=rows,
                options=options,
                setting=setting,
                others=others,
                seconds=seconds_text,
            )
    console.print(_table(rows))
    for row in rows:
        console.print(f"{row.layers} layers of {row.hidden}: {row.outcome}", highlight=False)
    return rows


def _measured(
    options: BlockOptions, layers: int, hidden: int, threads: int, watch: Watch
) -> tuple[BlockRow, float]:
    """Return one model in both forms, and the load by other programs."""
    sizes = options.sizes(layers, hidden)
    arguments = {"model": options.model, "sizes": sizes, "recipe": options.recipe}
    contenders = [
        Competitor(name, _FACTORY, {**arguments, "blocks": choice})
        for name, choice in _CHOICES.items()
    ]
    draw = zoo.build(options.model, **sizes).inputs
    title = f"{options.model}, {layers} layers of {hidden}"
    with Comparison([draw(0), draw(1)], WHOLE, threads, watch) as contest:
        del draw
        try:
            # One after the other, so that their seconds are those of a quiet machine.
            for contender in contenders:
                contest.enter([contender])
        except WorkerError as error:
            failed = [Entry(name, Verdict.FAILED, str(error)) for name in _CHOICES]
            return BlockRow(layers, hidden, *failed), 0.0
        background = BackgroundLoad()
        entries = contest.run(options.rounds, title, options.patience)
        return BlockRow(layers, hidden, entries[WHOLE], entries[BLOCKS]), background.share()


def seconds_text(entry: Entry) -> str:
    """Return the seconds of the backend, and in parentheses those of loading a saved model."""
    facts = entry.facts
    return f"{facts['seconds']:.1f} ({facts['load_seconds']:.2f})" if facts else "-"


def _table(rows: Sequence[BlockRow]) -> Table:
    table = Table(title=f"{WHOLE.capitalize()} / {BLOCKS}", title_justify="left")
    for column in ("layers x hidden", "backend s (load)", "call ms", "ratio of calls", "bits"):
        table.add_column(column, justify="right")
    for row in rows:
        both = row.whole, row.blocks
        calls = (words.milliseconds(one.time.median) if one.time else "-" for one in both)
        table.add_row(
            f"{row.layers} x {row.hidden}",
            " / ".join(map(seconds_text, both)),
            " / ".join(calls),
            ratio_text(row.call_ratio),
            {"yes": "equal", "no": "differ"}.get(row.equal_bits, "-"),
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(BlockOptions)
def main(**given: Any) -> None:
    """Measure what it saves to compile repeated blocks once, and what a call then takes."""
    with exit_on_error():
        run_block_time(BlockOptions(**given), Console())


if __name__ == "__main__":
    main()
