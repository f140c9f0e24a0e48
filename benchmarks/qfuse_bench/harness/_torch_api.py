"""Private torch API for measuring: Inductor's switches and the leaves of a result.

Functions that change global state are only for worker processes, which hold one contender each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.node import Argument, Target
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from qfuse.zoo._torchao_api import quiet_imports


def float_leaves(tree: object) -> list[torch.Tensor]:
    """Return the float tensors of a result, whatever containers they are in, as float32."""
    leaves = pytree.tree_leaves(tree)
    floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return [x.detach().to(torch.float32) for x in floats]


def map_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a tree of arguments with its float tensors in another dtype."""

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return pytree.tree_map(cast, tree)


def has_cpu_kernel(name: str) -> bool:
    """Whether an op such as ``namespace::op`` has a CPU kernel.

    An op of torchao has a schema even where its library of kernels was not built.
    """
    with quiet_imports():
        importlib.import_module("torchao.ops")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"))


def register_peer_patterns() -> None:
    """Import torchao's x86 quantizer, with its side effects on Inductor.

    It registers the quantized patterns and sets a pass in Inductor's global config.
    """
    importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")


def compile_frozen(
    model: nn.Module, *, max_autotune: bool = False, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return ``torch.compile(model)`` for static sizes, with frozen weights.

    Freezing is a global switch that is read when the model is first called, so it stays on.
    """
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = True
    inductor.max_autotune = max_autotune
    compiled: Callable[..., Any] = torch.compile(
        model, dynamic=False, options=None if options is None else dict(options)
    )
    return compiled


def register_decomposed() -> None:
    """Register the ops of PT2E, which torch does only when this module is imported."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")


def propagate(module: GraphModule) -> None:
    """Run a graph on fake tensors once, from the fake values of its placeholders."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    _Propagation(module, mode).propagate_dont_convert_inputs(*values)


class _Propagation(FakeTensorProp):
    """An interpreter that also makes constants fake, whatever the mode of the graph allows."""

    def get_attr(
        self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> torch.Tensor:
        """Return the fake tensor of a constant; the mode creates one per tensor."""
        del args, kwargs
        value = self.fetch_attr(str(target))
        return self._mode.from_tensor(value, static_shapes=True)
