"""Dump what qfuse makes of the zoo: one text file for each model, recipe and float type.

    python tools/replay_dump.py DIR [--only llama] [--workers 2]

Every model of the zoo, at a small size, is quantized with every recipe that applies to it, and
lowered for three pinned targets: AVX2, AVX512-VNNI and AMX. Neither this machine's instruction sets
nor its measured speeds have a say. A file holds the optimized graph, the lowered graph of each
target, a digest of every constant, the kernels that were chosen, and the code of every miss.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from qfuse import kernels, zoo
from qfuse.capture import capture
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Left, Lowered, Missed
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels
from qfuse.normalize import normalize
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.targets import Target
from qfuse.zoo import recipes

_TEXT = {"layers": 1, "hidden": 64, "heads": 4, "intermediate": 96, "batch": 2}
_LLAMA = _TEXT | {"kv_heads": 2, "vocab": 128, "seq": 12}
_IMAGES = {"image": 32, "classes": 10, "batch": 2}
CONVNETS: dict[str, dict[str, Any]] = {
    "resnet": _IMAGES | {"width": 8, "depths": (1, 1)},
    "resnet18": _IMAGES | {"width": 8, "depths": (1, 1, 1)},
    "mobilenet": _IMAGES | {"multiplier": 0.35},
    "mobilenet-v3": _IMAGES | {"multiplier": 0.25, "depth": 1},
    "efficientnet": _IMAGES | {"multiplier": 0.25, "depth": 1},
    "shufflenet": _IMAGES | {"width": 16, "depths": (2, 1), "head": 32},
    "densenet": _IMAGES | {"growth": 8, "depths": (2, 2)},
    "inception": _IMAGES | {"multiplier": 0.125, "depths": (1, 1)},
    "unet": _IMAGES | {"classes": 2, "width": 8, "levels": 2},
    "convnext": _IMAGES | {"width": 16, "depths": (1, 1)},
    "yolo": _IMAGES | {"image": 64, "classes": 2, "width": 8},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-decode": _LLAMA,
    "bert": _TEXT | {"vocab": 128, "seq": 12},
    "vit": _TEXT | _IMAGES | {"patch": 8},
    "whisper-encoder": _TEXT | {"mels": 16, "positions": 20},
    **CONVNETS,
    "minilm": {"batch": 2, "seq": 12},
}
_STATIC = "w8a8-static"
_PT2E = {_STATIC, "w8a8-static-bf16", "pt2e-dynamic"}
_CLASSIFIERS = ("resnet", "mobilenet", "convnext")
_AVX2 = {"avx2", "fma", "f16c"}
_VNNI = {*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
TARGETS: dict[str, tuple[set[str], str]] = {
    "avx2": (_AVX2, "AVX2"),
    "avx512_vnni": (_VNNI, "AVX512"),
    "amx": ({*_VNNI, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}, "AVX512"),
}


def cases() -> Iterator[tuple[str, str, str]]:
    """Model, recipe and float type of every case."""
    for name in MODELS:
        for recipe in recipes.names():
            slow = name in {*CONVNETS, "minilm"} - {"resnet"} and recipe in _PT2E - {_STATIC}
            # The convnets have one linear layer at most.
            linear_only = name in CONVNETS and recipe not in _PT2E
            once = name in _CLASSIFIERS and recipe == "w8a8-dynamic"
            if slow or (linear_only and not once):
                continue
            yield name, recipe, "float32"
            if name == "llama":
                yield name, recipe, "bfloat16"


def dump_case(case: tuple[str, str, str], folder: str) -> str:
    """Write the file of one case and return its name."""
    warnings.simplefilter("ignore")
    name, recipe, dtype = case
    torch.manual_seed(0)
    model = zoo.build(name, **MODELS[name] | {"dtype": getattr(torch, dtype)})
    batches = [(model.args, model.kwargs), model.inputs(1)]
    quantized = recipes.quantize(model.module, recipe, model.args, model.kwargs, None, batches)
    captured = capture(quantized.model, model.args, model.kwargs)
    cost = CostModel(CostProfile.pinned())
    with torch.no_grad():
        normal = normalize(captured, RewriteContext("normalize", cost, strict=False))
        optimized = optimize(normal, RewriteContext("optimize", cost, strict=False))
        parts = ["# optimized", to_text(optimized.graph), *_constants(optimized.module)]
        for isa in TARGETS:
            parts += [f"\n# lowered for {isa}", *_described(_lowered(optimized, isa, cost))]
    path = Path(folder, f"{name}.{recipe}.{dtype}.txt")
    path.write_text("\n".join(parts) + "\n")
    return path.name


def _lowered(optimized: OptimizedGraph, isa: str, cost: CostModel) -> LoweredGraph:
    features, capability = TARGETS[isa]
    target = Target.for_testing(features=frozenset(features), aten_capability=capability)
    # The paths of the target, not of this machine.
    library = replace(kernels.load(), instruction_sets=("portable", "avx2"))
    context = RewriteContext("lower", cost, strict=False)
    return lower(clone(optimized), target, cost, all_kernels(library), context)


def _described(low: LoweredGraph) -> list[str]:
    kernels_of = _counted(f"{e.place.op} -> {e.kernel}: {e.what}" for e in low.log.of(Lowered))
    left = _counted(f"left {e.place.op}: {e.reason}" for e in low.log.of(Left))
    misses = _counted(f"miss {e.rule}: {e.code}" for e in low.log.of(Missed))
    return [to_text(low.graph), *_constants(low.module), *kernels_of, *left, *misses]


def _constants(module: GraphModule) -> list[str]:
    lines = []
    for name, value in sorted(module.named_buffers()):
        flat = value.detach().contiguous().reshape(-1)
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        lines.append(f"constant {name}: {value.dtype} {tuple(value.shape)} {digest}")
    return lines


def _counted(texts: Iterable[str]) -> list[str]:
    return [f"{count} x {text}" for text, count in sorted(Counter(texts).items())]


def _one_thread() -> None:
    torch.set_num_threads(1)


def main() -> None:
    """Read the command line, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    wanted = [case for case in cases() if given.only in ".".join(case)]
    context = get_context("spawn")
    with ProcessPoolExecutor(given.workers, context, _one_thread) as pool:
        for name in pool.map(dump_case, wanted, [str(given.folder)] * len(wanted)):
            print(name, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
