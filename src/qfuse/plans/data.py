"""The content of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfuse.cost import CostProfile
from qfuse.ir.errors import CompiledModelError
from qfuse.ir.files import replaceable_file, unwritable
from qfuse.targets import Target, write_atomically

FORMAT = "qfuse-plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Site:
    """One rewrite, or one rule that is disabled everywhere.

    Attributes:
        site: Its key, ``stage/rule@node``; ``stage/rule`` is the whole rule.
        on: Whether it happens.
        op: The op of the node.
        where: The line of the user's source, or the path of the module, or "".
        times: How often it happened at that node.
        why: Why the recorded compilation went without it; "" if it happened, or if it was switched
            off by hand.
    """

    site: str
    on: bool = True
    op: str = ""
    where: str = ""
    times: int = 1
    why: str = ""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel of one op.

    Attributes:
        op: Name of the op's node in the optimized graph.
        kernel: Name of the kernel or of the backend; ``float``, ``expand`` or ``torch`` without.
        what: A description of the op: dtypes, granularities, epilogue.
        where: The line of the user's source, or the path of the module, or "".
    """

    op: str
    kernel: str
    what: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class PlanData:
    """The decisions of one compilation, and everything that they depend on besides the model.

    Attributes:
        versions: Version of each package that takes part, by name.
        target: The machine.
        profile: The speeds that decisions were priced with.
        without: Names of the disabled rewrites.
        own_kernels: Whether qfuse's own kernels were available.
        float_dtype: Dtype of unquantized ops, or ``None`` for the model's own dtypes.
        backends: Names of the backends that claimed ops.
        sites: The rewrites, in order.
        kernels: The kernel of each op, in order.
        prefer: ``speed`` or ``memory``: whether a product runs in float where that is faster.
        float_memory: By how many MB float weights may enlarge the constants.
        loops: Whether decisions were priced for compiled code, and not for running op by op; plans
            of older versions do not say it.
        times: The measured times that kernels were chosen by: see :class:`qfuse.cost.times.Times`.
    """

    versions: Mapping[str, str]
    target: Target
    profile: CostProfile
    without: tuple[str, ...] = ()
    own_kernels: bool = True
    float_dtype: str | None = None
    backends: tuple[str, ...] = ()
    sites: tuple[Site, ...] = ()
    kernels: tuple[KernelChoice, ...] = field(default=())
    # Plans without these were made when a quantized kernel ran wherever there was one.
    prefer: str = "memory"
    float_memory: int = 0
    loops: bool | None = None
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; :func:`qfuse.plans.read_plan` reads them."""
        options = {
            "without": list(self.without),
            "own_kernels": self.own_kernels,
            "float_dtype": self.float_dtype,
            "backends": list(self.backends),
            "prefer": self.prefer,
            "float_memory": self.float_memory,
            **({} if self.loops is None else {"loops": self.loops}),
        }
        times = {product: dict(seconds) for product, seconds in self.times.items()}
        return {
            "format": FORMAT,
            "version": VERSION,
            "versions": dict(self.versions),
            "target": self.target.to_dict(),
            "profile": self.profile.to_dict(),
            **({"times": times} if times else {}),
            "options": options,
            "sites": [_site(site) for site in self.sites],
            "kernels": [_kernel(choice) for choice in self.kernels],
        }

    def to_json(self) -> str:
        """Return the plan as text: one line per site and per kernel, to edit and compare."""
        data = self.to_dict()
        rows = {name: data.pop(name) for name in ("sites", "kernels")}
        head = json.dumps(data, indent=2)[: -len("\n}")]
        lists = (f'  "{name}": {_lines(values)}' for name, values in rows.items())
        return ",\n".join((head, *lists)) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which holds the old or the new text at any time.

        Of a link, it is the file that it leads to.

        Raises:
            OptionsError: The file cannot be written.
        """
        file = replaceable_file(path)
        try:
            write_atomically(file, self.to_json())
        except OSError as error:
            raise unwritable(error, path) from error


def decisions_of(data: PlanData | None) -> PlanData:
    """Return the decisions of a compiled model.

    Raises:
        CompiledModelError: There are none, since the model was loaded from a file.
    """
    if data is None:
        raise CompiledModelError(
            "the file of a compiled model holds its graph as text, and not the decisions of a plan",
            fix="call fast.plan.save(path) in the process that compiles the model",
        )
    return data


def _lines(values: list[dict[str, Any]]) -> str:
    if not values:
        return "[]"
    rows = ",\n".join(f"    {json.dumps(value)}" for value in values)
    return f"[\n{rows}\n  ]"


def _site(site: Site) -> dict[str, Any]:
    row: dict[str, Any] = {"site": site.site, "on": site.on, "op": site.op}
    if site.times != 1:
        row["times"] = site.times
    row.update({name: text for name in ("where", "why") if (text := getattr(site, name))})
    return row


def _kernel(choice: KernelChoice) -> dict[str, Any]:
    row = {"op": choice.op, "kernel": choice.kernel, "what": choice.what}
    return row | ({"where": choice.where} if choice.where else {})
