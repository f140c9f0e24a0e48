"""Facts about a whole compilation, as typed values with their units in their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from qfuse._version import __version__
from qfuse.ir.events import Exactness
from qfuse.ir.units import seconds_text

if TYPE_CHECKING:
    from qfuse.targets import Target


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The machine that was compiled for.

    Attributes:
        model: Name of the CPU; its architecture if the name is unknown.
        architecture: ``x86_64``, ``aarch64``, ...
        isa: The instruction set that ATen dispatches on, such as ``AVX512``.
        features: Usable instruction sets that kernels ask for, sorted.
        threads: Threads of torch.
    """

    model: str
    architecture: str
    isa: str
    features: tuple[str, ...]
    threads: int

    def __str__(self) -> str:
        return f"{self.model}, {self.threads} thread{'s' * (self.threads != 1)}, {self.isa}"


def target_facts(target: Target) -> TargetFacts:
    """Return the facts about a target that a report names."""
    return TargetFacts(
        target.model or target.architecture,
        target.architecture,
        target.aten_capability,
        tuple(sorted(target.features)),
        target.threads,
    )


def utc_now() -> str:
    """Return the current time in UTC, to the second: ``2026-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """What a backend of another package claimed.

    Attributes:
        backend: Its name.
        nodes: Number of nodes that it claimed.
        exactness: How far its results may differ.
        used: Whether its code runs; ``False`` if it failed the check and the references run.
    """

    backend: str
    nodes: int
    exactness: Exactness = Exactness.ROUNDING
    used: bool = True

    def __str__(self) -> str:
        count = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        lossy = f", {self.exactness}" if self.exactness is Exactness.LOSSY else ""
        return f"{count}{lossy}{'' if self.used else ', not used: the references run'}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a whole compilation; ``None`` and "" where they do not apply.

    Attributes:
        qfuse_version: Version of qfuse.
        torch_version: Version of torch, with its local part.
        created: When the report was made: UTC, ISO 8601.
        model: Name of the model: its class, or the name that the command line was given.
        target: The machine.
        backend: What runs the lowered graph; ``None`` if it was not compiled.
        check: How values were checked.
        float_dtype: Dtype of unquantized ops, if it is not the model's own.
        setup_seconds: Time to compile qfuse's kernels and to measure the machine, if this was the
            first compilation that needed it.
        capture_seconds: Time to capture the graph.
        plan_seconds: Time to rewrite and lower it.
        compile_seconds: Time to compile what was lowered.
        source_seconds: Measured time of a call of the source model; ``None`` if not measured.
        compiled_seconds: Measured time of a call of the compiled model, in the same rounds.
        constant_bytes: Bytes of the constants of the lowered graph.
        prefer: ``speed`` or ``memory``: whether products run in float where that is faster.
        float_bytes: By how much weights that were dequantized at compile time enlarge these.
        claims: What backends of other packages claimed.
        entry_point: ``torch.compile``, for a graph of Dynamo.
        standalone_pass: Name of the pass, in a report of :mod:`qfuse.passes`.
        graph: Where a graph of Inductor comes from, in a report of :func:`qfuse.reports`.
        frozen: Whether the weights of that graph are constants.
    """

    qfuse_version: str = __version__
    torch_version: str = ""
    created: str = ""
    model: str = ""
    target: TargetFacts | None = None
    backend: str | None = None
    check: str | None = None
    float_dtype: str | None = None
    setup_seconds: float | None = None
    capture_seconds: float | None = None
    plan_seconds: float | None = None
    compile_seconds: float | None = None
    source_seconds: float | None = None
    compiled_seconds: float | None = None
    constant_bytes: int | None = None
    prefer: str = ""
    float_bytes: int | None = None
    claims: tuple[ClaimFacts, ...] = ()
    entry_point: str = ""
    standalone_pass: str = ""
    graph: str = ""
    frozen: bool | None = None

    @property
    def lowered(self) -> bool:
        """Whether the graph was lowered to kernels; passes and Inductor's slots do not."""
        return self.target is not None

    def rows(self) -> dict[str, str]:
        """Return the facts that apply, by their names in text."""
        made: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "backend" and self.lowered and value is None:
                value = "none (explained, not compiled)"
            if value not in (None, "", ()):
                made.update(_row(field.name, value))
        return made


def _row(name: str, value: Any) -> dict[str, str]:
    if name in _OWN_ROWS:
        return _OWN_ROWS[name](value)
    stem, _, unit = name.rpartition("_")
    if unit == "seconds":
        measured = name in {"source_seconds", "compiled_seconds"}
        return {f"{stem} call" if measured else stem: seconds_text(value)}
    if unit == "bytes":
        return {f"{stem}s": f"{value / 1e6:.1f} MB"}
    if unit == "version":
        return {stem: value}
    return {name.replace("_", " "): str(value)}


_OWN_ROWS: Mapping[str, Callable[[Any], dict[str, str]]] = {
    "claims": lambda claims: {f"claimed by {claim.backend}": str(claim) for claim in claims},
    "float_dtype": lambda dtype: {"float dtype": f"{dtype} (lossy, by request)"},
    "float_bytes": lambda count: {"float weights": f"+{count / 1e6:.1f} MB"},
    # What is usual needs no line.
    "prefer": lambda prefer: {} if prefer == "speed" else {"prefer": prefer},
}
