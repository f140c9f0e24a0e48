"""``python -m qfuse_bench.experiments.sentence_backends``: qfuse in sentence-transformers.

The trained MiniLM encodes the same sentences in one run: with the backends ``torch``, ``onnx`` and
``openvino`` of sentence-transformers, with the int8 file that its export to ONNX makes, and with
the transformer inside quantized by torchao, as it is and compiled by qfuse. Each is a process of
its own, and they take turns.

The backends ``onnx`` and ``openvino`` need optimum-onnx and optimum-intel. Their releases pin the
version of transformers, and with it that of sentence-transformers: docs/benchmarks.md has versions
that fit, for an environment of their own. What is not installed is a row with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import Dim

import qfuse
from qfuse.cli.errors import exit_on_error
from qfuse.cli.options import options_of
from qfuse.ir.errors import OptionsError
from qfuse.zoo._extras import minilm_folder
from qfuse_bench.harness.machine import Setting
from qfuse_bench.harness.measure import Series, compare, measure
from qfuse_bench.harness.process import Job, Worker, WorkerError
from qfuse_bench.harness.progress import watching
from qfuse_bench.harness.worker import Inputs, Subject
from qfuse_bench.report import format as words
from qfuse_bench.report.outputs import Outputs

TORCH, INT8, QFUSE = "torch", "torch, int8", "qfuse, int8"
ONNX, ONNX_INT8, OPENVINO = "onnx", "onnx, int8", "openvino"
ENCODERS = (QFUSE, TORCH, INT8, ONNX, ONNX_INT8, OPENVINO)
"""What encodes; each is compared with the first."""

BATCHES: Mapping[str, int] = MappingProxyType({"one sentence": 1, "32 sentences": 32})
"""How many sentences a call encodes."""

_SENTENCES = (
    "A compiler translates a program.",
    "The weights of the encoder are integers of eight bits, and its activations are quantized.",
    "It rained all day, and nobody went out.",
    "How do I find the rewrite that changed the results of my model?",
)
_FACTORY = "qfuse_bench.experiments.sentence_backends:build"
_SECTION = "sentence-backends"
_NAMES = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceOptions:
    """What to measure.

    Attributes:
        rounds: Interleaved rounds.
        encoders: Names out of :data:`ENCODERS`.
        batches: Names out of :data:`BATCHES`.
        threads: OpenMP threads; 0 is one per core.
        page: A page with a section to write the table into.
    """

    rounds: int = field(default=15, metadata={"help": "interleaved rounds"})
    encoders: tuple[str, ...] = field(default=ENCODERS, metadata={"help": "what encodes"})
    batches: tuple[str, ...] = field(
        default=tuple(BATCHES), metadata={"help": "how many sentences a call has"}
    )
    threads: int = field(default=0, metadata={"help": "OpenMP threads; 0 is one per core"})
    page: Path | None = field(
        default=None, metadata={"help": "a Markdown page to write the table into"}
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        unknown = sorted(set(self.encoders) - set(ENCODERS))
        if unknown:
            raise OptionsError(
                f"{unknown[0]!r} is not an encoder", fix=f"one of: {'; '.join(ENCODERS)}"
            )
        strange = sorted(set(self.batches) - set(BATCHES))
        if strange:
            raise OptionsError(
                f"{strange[0]!r} is not a batch", fix=f"one of: {'; '.join(BATCHES)}"
            )
        if self.rounds < 1:
            raise OptionsError("nothing can be measured", fix="ask for at least one round")


@dataclass(frozen=True, slots=True)
class SentenceRow:
    """What one encoder did with one batch.

    Attributes:
        batch: Out of :data:`BATCHES`.
        encoder: Out of :data:`ENCODERS`.
        time: Milliseconds of a call, in words.
        versus: The time of qfuse as a part of this one, in words.
        cosine: The least cosine between an embedding and that of the float model.
        failed: Why it did not run; "" if it did.
    """

    batch: str
    encoder: str
    time: str = ""
    versus: str = ""
    cosine: float = 0.0
    failed: str = ""


class Compiled(nn.Module):
    """A compiled BERT with the keywords and attributes that sentence-transformers uses."""

    def __init__(self, bert: Any, fast: qfuse.CompiledModel) -> None:
        super().__init__()
        self.fast, self.config = fast, bert.config
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, **given: Any) -> Any:
        """Return the model's output; options of the library are dropped."""
        return self.fast(*(given[name] for name in _NAMES))


def build(arguments: Mapping[str, Any], example: Inputs) -> Subject:
    """Return one encoder in a worker.

    Args:
        arguments: ``encoder``, ``model`` and ``folder``, which the encoder may write into.
        example: A call with sentences.
    """
    encoder = _encoder(arguments["encoder"], arguments["model"], Path(arguments["folder"]), example)
    return Subject(lambda texts: encoder.encode(texts, convert_to_tensor=True))


def _encoder(name: str, model: str, folder: Path, example: Inputs) -> Any:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    local: dict[str, Any] = {"device": "cpu", "local_files_only": True}
    if name == ONNX:
        return SentenceTransformer(model, **local, backend="onnx")
    if name == OPENVINO:
        return SentenceTransformer(model, **local, backend="openvino")
    if name == ONNX_INT8:
        from sentence_transformers import export_dynamic_quantized_onnx_model  # noqa: PLC0415

        plain = SentenceTransformer(model, backend="onnx", **local)
        plain.save_pretrained(str(folder))
        export_dynamic_quantized_onnx_model(plain, "avx512_vnni", str(folder))
        (file,) = folder.rglob("*_qint8_avx512_vnni.onnx")
        named = {"file_name": str(file.relative_to(folder))}
        return SentenceTransformer(str(folder), backend="onnx", model_kwargs=named, **local)
    encoder = SentenceTransformer(model, **local)
    if name != TORCH:
        from torchao.quantization import (  # noqa: PLC0415
            Int8DynamicActivationInt8WeightConfig,
            quantize_,
        )

        # Its name before and since version 6.
        attribute = "model" if hasattr(encoder[0], "model") else "auto_model"
        bert = getattr(encoder[0], attribute)
        quantize_(bert, Int8DynamicActivationInt8WeightConfig())
        if name == INT8:
            # `encode` moves the model under inference mode, which fails for tensor subclasses.
            encoder.to = lambda *_, **__: encoder  # type: ignore[method-assign]
        else:
            tokens = encoder.tokenizer(example[0][0], padding=True, return_tensors="pt")
            setattr(encoder[0], attribute, _compiled(bert, tokens))
    return encoder


def _compiled(bert: Any, tokens: Mapping[str, torch.Tensor]) -> Compiled:
    """Compile for any batch and length."""
    # An axis of the example that is 1 would be taken for a constant.
    inputs = tuple(torch.cat([tokens[name]] * 2) for name in _NAMES)
    sizes = {
        0: Dim("batch", min=1, max=256),
        1: Dim("seq", min=1, max=bert.config.max_position_embeddings),
    }
    fast = qfuse.compile(bert, inputs, dynamic_shapes=dict.fromkeys(_NAMES, sizes))
    return Compiled(bert, fast)


def run_sentence_backends(options: SentenceOptions, console: Console) -> list[SentenceRow]:
    """Build every encoder, time them in turns, and show a table."""
    outputs = Outputs(_SECTION, options.page)
    threads = options.threads or torch.get_num_threads()
    rows: list[SentenceRow] = []
    steps = len(options.batches) * len(options.encoders)
    with tempfile.TemporaryDirectory(prefix="qfuse-sentences-") as name:
        folder = Path(name)
        with watching(console, steps) as watch:
            for batch in options.batches:
                texts = [_SENTENCES[i % len(_SENTENCES)] for i in range(BATCHES[batch])]
                example: Inputs = ((texts,), {})
                with ExitStack() as stack:
                    workers: dict[str, Worker] = {}
                    failed: dict[str, str] = {}
                    for encoder in options.encoders:
                        watch.say(f"{batch}, {encoder}")
                        own = tempfile.mkdtemp(dir=folder)
                        given = {"encoder": encoder, "model": str(minilm_folder()), "folder": own}
                        try:
                            worker = Worker(Job(_FACTORY, given, threads), example)
                            workers[encoder] = stack.enter_context(worker)
                        except WorkerError as error:
                            failed[encoder] = str(error)
                        watch.advance()
                    series = measure(workers, options.rounds)
                    found = {each: worker.answers([example])[0] for each, worker in workers.items()}
                made = rows_of(batch, options.encoders, series, found, failed)
                # Building takes minutes: what is known is shown.
                console.print(_table(made))
                rows += made
    outputs.write(rows=rows, setting=Setting.here(threads), packages=_packages())
    return rows


def rows_of(
    batch: str,
    encoders: Sequence[str],
    series: Mapping[str, Series],
    found: Mapping[str, Sequence[torch.Tensor]],
    failed: Mapping[str, str],
) -> list[SentenceRow]:
    """Return a row per encoder.

    Args:
        batch: The name of the batch.
        encoders: The names, in order.
        series: The times of those that ran.
        found: Their embeddings.
        failed: Why the others did not.
    """
    rows = []
    for name in encoders:
        if name in failed:
            rows.append(SentenceRow(batch, name, failed=failed[name]))
            continue
        ratio = None
        if name != QFUSE and QFUSE in series:
            ratio = compare(series[QFUSE], series[name])
        cosine = float("nan")
        if TORCH in found:
            each = torch.cosine_similarity(found[name][0], found[TORCH][0], dim=-1)
            cosine = each.min().item()
        time = words.milliseconds(series[name].median)
        rows.append(SentenceRow(batch, name, time, words.ratio(ratio), cosine))
    return rows


def _packages() -> dict[str, str]:
    """Return the versions of what the backends consist of, of those that are installed."""
    names = ("sentence-transformers", "optimum-onnx", "optimum-intel", "onnxruntime", "openvino")
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _table(rows: Sequence[SentenceRow]) -> Table:
    table = Table(title="encode(), trained MiniLM", title_justify="left")
    for column in ("batch", "backend"):
        table.add_column(column)
    for column in ("ms", "qfuse / it", "least cosine with float"):
        table.add_column(column, justify="right")
    for row in rows:
        if row.failed:
            table.add_row(row.batch, row.encoder, "-", "-", row.failed)
        else:
            table.add_row(row.batch, row.encoder, row.time, row.versus, f"{row.cosine:.4f}")
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(SentenceOptions)
def main(**given: Any) -> None:
    """Measure qfuse inside sentence-transformers beside the backends that it has."""
    with exit_on_error():
        run_sentence_backends(SentenceOptions(**given), Console())


if __name__ == "__main__":
    main()
