"""Compiled graphs that many tests share: one compilation takes about ten seconds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.support.graphs.lowered import decode_constants, decode_graph, projection_graph

from qfuse.backends import BackendOptions, CompiledModule, compile_graph
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.targets.compiler import find_compiler


class Pair(NamedTuple):
    """One graph, compiled and run op by op, on the same constants."""

    graph: LoweredGraph
    fast: CompiledModule
    plain: CompiledModule


def compiled(graph: LoweredGraph, folder: Path) -> CompiledModule:
    options = BackendOptions(cache_folder=folder)
    return CompiledModule(graph.signature, compile_graph(graph, backend="aoti", options=options))


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the workers of one test run share, and no other run sees."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "popen-gw" in base.name else base) / "aoti-cache"


@pytest.fixture(scope="session")
def needs_compiler() -> None:
    """Skip where there is no C++ compiler."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")


@pytest.fixture(scope="session")
def projection(cache_folder: Path, needs_compiler: None) -> Pair:
    """A stateless graph with a dynamic number of rows."""
    del needs_compiler
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        graph = projection_graph()
    plain = CompiledModule(graph.signature, compile_graph(graph, backend="eager"))
    return Pair(graph, compiled(graph, cache_folder / "projection"), plain)


@pytest.fixture
def decode(cache_folder: Path, needs_compiler: None) -> Pair:
    """A graph with state, fresh for every test; compiled once, then found in the cache."""
    del needs_compiler
    graph = decode_graph(decode_constants())
    twin = decode_graph({name: v.clone() for name, v in graph.module.named_buffers()})
    twin.module.register_buffer("tail", twin.module.get_buffer("base")[3:])
    plain = CompiledModule(twin.signature, compile_graph(twin, backend="eager"))
    return Pair(graph, compiled(graph, cache_folder / "decode"), plain)
