"""``python -m qfuse_bench.experiments.same_bits``: one model under each instruction set.

Each engine runs the same model on the same inputs in processes of their own, each limited to other
instruction sets by the engine's own variables. The table has the SHA-256 of the results, how many
of their numbers have other bits than with all instruction sets of the machine, by how much they
differ, and their signal-to-noise ratio against the float model.

qfuse runs one saved file with each path of its kernels; and once more the model is compiled from
its source, limited as torch is. The others build the model anew for each limit. ONNX Runtime has no
variable that limits it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import qfuse
from qfuse import kernels, zoo
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.saving import digest_of
from qfuse.zoo import recipes
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.process import Job, Worker, WorkerError
from qfuse_bench.harness.progress import Watch, watching
from qfuse_bench.harness.worker import Inputs, Subject
from qfuse_bench.peers.contenders import CALIBRATION_SEEDS, FACTORY, Contender, Engine, FloatType
from qfuse_bench.report.outputs import Outputs

_SECTION = "same-bits"
_SAVED = "qfuse_bench.experiments.same_bits:load_saved"
_SEED = 7
_DIGITS = 12
_Found = Sequence[torch.Tensor] | str

TORCH_LIMITS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "all": {},
        "AVX512 without VNNI": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    }
)
"""The limits of torch: oneDNN has the integer products, and ATen the other ops."""

LIMITS: Mapping[Engine, Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        Engine.INDUCTOR: TORCH_LIMITS,
        Engine.OPENVINO: {
            "all": {},
            "AVX512 without VNNI": {
                "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
                "OV_CPU_MAX_ISA": "AVX512_CORE",
            },
            "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "OV_CPU_MAX_ISA": "AVX2"},
        },
        Engine.ONNX_RUNTIME: {"all": {}},
    }
)
"""The variables of each peer, by what they leave."""

ANEW: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "compiled for AVX2": {
            "QFUSE_ISA": "avx2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        }
    }
)
"""qfuse on the whole program with fewer instruction sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameBitsOptions:
    """What to run.

    Attributes:
        model: Name in the zoo.
        recipe: How it is quantized.
        seq: Tokens of the input; 0 is the model's default, and for models that have none.
        engines: The peers; those that are not installed are left out, and named.
        threads: OpenMP threads; 0 is one per core.
        page: A page with a section to write the table into.
    """

    model: str = field(default="minilm", metadata={"help": "a model of the zoo"})
    recipe: str = field(default="w8a8-dynamic", metadata={"help": "quantize with this recipe"})
    seq: int = field(default=0, metadata={"help": "tokens of the input; 0 is the default"})
    engines: tuple[str, ...] = field(
        default=tuple(str(engine) for engine in LIMITS), metadata={"help": "a peer to run"}
    )
    threads: int = field(default=0, metadata={"help": "OpenMP threads; 0 is one per core"})
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        known = [str(engine) for engine in LIMITS]
        unknown = sorted(set(self.engines) - set(known))
        if unknown:
            raise OptionsError(
                f"{unknown[0]!r} is not a peer of this table", fix=f"one of {', '.join(known)}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model."""
        return {"seq": self.seq} if self.seq else {}


@dataclass(frozen=True, slots=True)
class BitsRow:
    """What one engine computed under one limit.

    Attributes:
        engine: The engine.
        limit: What it was limited to.
        sha256: Of the results.
        numbers: How many numbers the results have.
        different: How many of them have other bits than in the first row of the engine.
        deviation: The largest difference, as a part of the root mean square of the first row.
        sqnr: Against the float model, in dB.
        failed: Why there are no results; "" if there are.
    """

    engine: str
    limit: str
    sha256: str = ""
    numbers: int = 0
    different: int = 0
    deviation: float = 0.0
    sqnr: float = 0.0
    failed: str = ""


def load_saved(arguments: Mapping[str, Any], example: Inputs) -> Subject:
    """Load a saved model in a worker.

    Args:
        arguments: ``path``.
        example: Not used.
    """
    del example
    return Subject(qfuse.load(arguments["path"]))


def compare(
    engine: str,
    results: Mapping[str, _Found],
    reference: Sequence[torch.Tensor],
) -> list[BitsRow]:
    """Return a row per limit.

    Args:
        engine: The name of the engine.
        results: The results by limit, or why there are none; the others are compared with the
            first.
        reference: The results of the float model.
    """
    rows, first = [], None
    for limit, found in results.items():
        if isinstance(found, str):
            rows.append(BitsRow(engine, limit, failed=found))
            continue
        first = found if first is None else first
        flat, before = _flat(found), _flat(first)
        change = (flat.double() - before.double()).abs().max().item()
        rows.append(
            BitsRow(
                engine,
                limit,
                digest_of(found),
                flat.numel(),
                int((flat.view(torch.int32) != before.view(torch.int32)).sum()),
                change / before.double().square().mean().sqrt().item(),
                _sqnr(flat.double(), _flat(reference).double()),
            )
        )
    return rows


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def _sqnr(found: torch.Tensor, reference: torch.Tensor) -> float:
    noise = (found - reference).square().sum()
    return float(10 * torch.log10(reference.square().sum() / noise))


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs contenders in processes of their own."""

    options: SameBitsOptions
    threads: int
    inputs: Inputs
    folder: Path
    watch: Watch

    def run(self, what: str, factory: str, arguments: Any, limit: Mapping[str, str]) -> _Found:
        """Return the results, or why there are none."""
        self.watch.say(what)
        caches = {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=self.folder)}
        job = Job(factory, arguments, self.threads, {**limit, **caches})
        try:
            with Worker(job, self.inputs) as worker:
                return worker.answers([self.inputs])[0]
        except WorkerError as error:
            return str(error)
        finally:
            self.watch.advance()

    def model(
        self, engine: Engine, what: str, limit: Mapping[str, str], *, quantized: bool = True
    ) -> _Found:
        """Build the model with an engine, and run it."""
        contender = Contender(
            engine=engine,
            float_type=FloatType.F32,
            model=self.options.model,
            sizes=self.options.sizes,
            recipe=self.options.recipe if quantized else None,
        )
        return self.run(f"{engine}, {what}", FACTORY, contender.to_dict(), limit)


def run_same_bits(options: SameBitsOptions, console: Console) -> list[BitsRow]:
    """Run every engine under each limit, and show a table."""
    outputs = Outputs(_SECTION, options.page)
    threads = options.threads or torch.get_num_threads()
    inputs: Inputs = zoo.build(options.model, **options.sizes).inputs(_SEED)
    with tempfile.TemporaryDirectory(prefix="qfuse-bits-") as name:
        path = Path(name, "model.qfuse")
        paths = _save(options, inputs, path)
        engines = [Engine(each) for each in options.engines]
        count = 1 + len(paths) + len(ANEW) + sum(len(LIMITS[engine]) for engine in engines)
        with watching(console, count) as watch:
            runs = _Runs(options, threads, inputs, Path(name), watch)
            reference = runs.model(Engine.EAGER, "float", {}, quantized=False)
            if isinstance(reference, str):
                raise OptionsError(f"the float model does not run: {reference}")
            found = {
                isa: runs.run(f"qfuse, {isa}", _SAVED, {"path": str(path)}, {"QFUSE_ISA": isa})
                for isa in reversed(paths)
            }
            found |= {what: runs.model(Engine.QFUSE, what, limit) for what, limit in ANEW.items()}
            rows = compare("qfuse", found, reference)
            for engine in engines:
                limits = LIMITS[engine].items()
                found = {what: runs.model(engine, what, limit) for what, limit in limits}
                rows += compare(str(engine), found, reference)
    console.print(_table(rows))
    outputs.write(rows=rows, setting=Setting.here(threads), options=options)
    return rows


def _save(options: SameBitsOptions, inputs: Inputs, path: Path) -> tuple[str, ...]:
    """Compile and save the model; return the paths of the kernels."""
    built = zoo.build(options.model, **options.sizes)
    args, kwargs = inputs
    calibration = [built.inputs(seed) for seed in CALIBRATION_SEEDS]
    quantized = recipes.quantize(
        built.module, options.recipe, built.args, built.kwargs, None, calibration
    )
    qfuse.compile(quantized.model, args, kwargs).save(path)
    return kernels.load().instruction_sets


def _table(rows: Sequence[BitsRow]) -> Table:
    table = Table(title="The same numbers", title_justify="left")
    for column in ("engine", "instruction sets", "SHA-256"):
        table.add_column(column)
    for column in ("other bits", "largest difference", "SQNR"):
        table.add_column(column, justify="right")
    for row in rows:
        if row.failed:
            table.add_row(row.engine, row.limit, row.failed)
            continue
        numbers = f"{row.different:,} of {row.numbers:,}", f"{row.deviation:.1e}"
        sqnr = f"{row.sqnr:.1f} dB"
        table.add_row(row.engine, row.limit, row.sha256[:_DIGITS], *numbers, sqnr)
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(SameBitsOptions)
def main(**given: Any) -> None:
    """Run one model under each instruction set, and compare the bits of the results."""
    with exit_on_error():
        run_same_bits(SameBitsOptions(**given), Console())


if __name__ == "__main__":
    main()
