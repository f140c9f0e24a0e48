"""Run a lowered graph op by op with a clock on every op."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from qfuse.backends import Runner
from qfuse.backends.claimed import run_claimed
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import (
    CLAIM_META,
    SITE_META,
    WORK_META,
    LoweredGraph,
    place_of,
)
from qfuse.ir.graph.text import op_text
from qfuse.pipeline import Plan
from qfuse.profile.memory import live_bytes
from qfuse.profile.profile import OpTime, Profile
from qfuse.profile.work import OpWork, aten_work
from qfuse.snapshots import byte_count

_WARM_UP = 2
_MIN_ROUNDS, _MAX_ROUNDS = 5, 100


def profile_plan(
    plan: Plan,
    runner: Runner,
    inputs: Sequence[torch.Tensor],
    machine: CostProfile,
    seconds: float = 2.0,
) -> Profile:
    """Measure every op of a plan, and its compiled code as a whole.

    Each round runs the graph op by op and then the compiled code. The time of an op is its least
    one, so that a stall of the machine in one round does not dwarf the other ops. Neither the
    inputs, nor the model's state, nor the random state changes.

    Args:
        plan: The plan.
        runner: Its compiled code.
        inputs: The flat inputs, checked.
        machine: The speeds that predictions and shares of the roofline are relative to.
        seconds: After this time no new round starts; at least five run.
    """
    module = plan.lowered.module
    if plan.backends:
        module = run_claimed(plan.lowered, plan.backends).inner.module
    clock = _Clock(module)
    whole = _Whole(runner, inputs)
    names = [str(n.target) for n in plan.lowered.graph.find_nodes(op="placeholder")]
    leaves = plan.lowered.signature.inputs
    feeds = [leaf.placeholder for leaf in leaves if leaf.placeholder is not None]
    ordered = [inputs[feeds.index(name)] for name in names]
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        for _ in range(_WARM_UP):
            clock.run(*ordered)
            whole.run()
        works, sizes = clock.works, clock.sizes
        clock.start()
        times, begin = list[int](), time.perf_counter()
        while len(times) < _MAX_ROUNDS:
            clock.run(*ordered)
            times.append(whole.run())
            if len(times) >= _MIN_ROUNDS and time.perf_counter() - begin > seconds:
                break
    as_traced = _sizes_are_as_traced(plan.lowered, inputs)
    ops = _ops(plan.lowered, clock, works, CostModel(machine), as_traced=as_traced)
    return Profile(
        ops,
        round(statistics.median(times)),
        min(times),
        runner.backend,
        len(times),
        machine,
        live_bytes(plan.lowered.graph, sizes),
    )


class _Clock(Interpreter):
    """Interprets a graph, and records the time of every call."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._weights = frozenset(n for n in module.graph.nodes if n.op == "get_attr")
        self._warm = False
        self.nanoseconds: dict[str, list[int]] = {}
        self.works: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}

    def start(self) -> None:
        """Stop the warm-up: from now on time is recorded, and nothing else."""
        self._warm = True

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        begin = time.perf_counter_ns()
        result = target(*args, **kwargs)
        taken = time.perf_counter_ns() - begin
        if self._warm:
            self.nanoseconds.setdefault(n.name, []).append(taken)
        else:
            self._inspect(n, result)
        return result

    def _inspect(self, node: Node, result: object) -> None:
        values = {operand: self.env[operand] for operand in node.all_input_nodes}
        tensors = {n: v for n, v in values.items() if _is_plain(v)}
        if _is_plain(result):
            self.works[node.name] = aten_work(node, tensors, result, self._weights)
        size = byte_count(result)
        if size is not None:
            self.sizes[node.name] = size


class _Whole:
    """Runs compiled code on copies of the inputs and the state, the same ones in every run."""

    def __init__(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [x.clone() for x in inputs]
        self._runner = runner.fork()
        self._state = [t.clone() for t in self._runner.written(self._inputs)]

    def run(self) -> int:
        """Run the code, and return how many nanoseconds it took."""
        begin = time.perf_counter_ns()
        self._runner.run(list(self._inputs))
        taken = time.perf_counter_ns() - begin
        for target, before in zip(self._runner.written(self._inputs), self._state, strict=True):
            target.copy_(before)
        return taken


@dataclass(slots=True)
class _Part:
    """Nodes that run one after the other and implement one op."""

    nodes: list[Node]
    site: str
    work: Any = None
    nanoseconds: int = field(default=0)


def _ops(
    lowered: LoweredGraph, clock: _Clock, works: dict[str, Any], cost: CostModel, *, as_traced: bool
) -> tuple[OpTime, ...]:
    least = {name: min(times) for name, times in clock.nanoseconds.items()}
    parts = list(_parts(lowered))
    # The work of a kernel whose nodes are not next to each other cannot be given to either part.
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.site] = counts.get(part.site, 0) + (part.work is not None)
    ops = []
    for part in parts:
        plan = part.work if as_traced and counts[part.site] == 1 else None
        if part.work is None:
            plan = works.get(part.nodes[0].name)
        main = _main(part.nodes, least)
        place, claim = place_of(main), main.meta.get(CLAIM_META)
        ops.append(
            OpTime(
                name=main.name,
                nodes=tuple(node.name for node in part.nodes),
                op=op_text(main) if claim is None else f"{claim}: {op_text(main)}",
                site=part.site,
                module=place.module,
                source=place.source,
                nanoseconds=sum(least[node.name] for node in part.nodes),
                work=None if plan is None else OpWork.of(plan, cost),
            )
        )
    return tuple(ops)


def _parts(lowered: LoweredGraph) -> Iterator[_Part]:
    """Yield the ops of a graph: the nodes of a kernel together, all others one by one."""
    calls = [node for node in lowered.graph.nodes if node.op == "call_function"]

    def key(pair: tuple[int, Node]) -> object:
        index, node = pair
        return node.meta[SITE_META] if WORK_META in node.meta else index

    for _, group in groupby(enumerate(calls), key):
        nodes = [node for _, node in group]
        site = str(nodes[0].meta.get(SITE_META, ""))
        yield _Part(nodes, site, nodes[0].meta.get(WORK_META))


def _main(nodes: Sequence[Node], nanoseconds: dict[str, int]) -> Node:
    """Return the node to name an op after: its kernel, or else the slowest node."""
    kernels = [n for n in nodes if op_text(n).startswith("qfuse.")]
    real = [n for n in nodes if n.target is not operator.getitem]
    return max(kernels or real or nodes, key=lambda n: nanoseconds[n.name])


def _sizes_are_as_traced(lowered: LoweredGraph, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the sizes of a call are those that kernels were costed with."""
    symbols = lowered.signature.symbols
    fed = [leaf for leaf in lowered.signature.inputs if leaf.placeholder is not None]
    return all(
        size == symbols[symbol].hint
        for leaf, value in zip(fed, inputs, strict=True)
        for symbol, size in zip(leaf.shape, value.shape, strict=True)
        if isinstance(symbol, str) and symbol in symbols
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
