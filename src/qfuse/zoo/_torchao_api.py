"""The zoo's only file that uses torchao, and private torch API for it.

Importing torchao has side effects, and using it has more: log lines about extensions for GPUs, a
custom pass left behind in Inductor's global config, deprecation warnings that it provokes in torch.
Here they are undone or silenced individually.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

# (logger, text): log lines of torchao's import, none of them relevant on CPUs.
_IMPORT_LOGS = (
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is an Enum subclass and is now natively supported"),
)
# torch's stubs leave int4 out.
_INT: Mapping[int, torch.dtype] = MappingProxyType(
    {4: torch.int4, 8: torch.int8}  # type: ignore[attr-defined]
)
_IMPORT_WARNING = r"`torch\.jit\.script(_method)?` is deprecated"
# From torch's own code when it copies the exported module that torchao hands it.
_COPY_WARNING = r"`isinstance\(treespec, LeafSpec\)` is deprecated"


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """Import torchao, and run a block that uses it without its warnings."""
    with quiet_imports():
        import torchao.quantization  # noqa: PLC0415
        import torchao.quantization.pt2e  # noqa: F401, PLC0415
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_COPY_WARNING, category=FutureWarning)
        yield


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Run a block that may import torchao, without the log lines of its import.

    `transformers` imports it too, as soon as a model is built.
    """

    def drop(text: str) -> Callable[[logging.LogRecord], bool]:
        return lambda record: text not in str(record.msg)

    filters = [(logging.getLogger(name), drop(text)) for name, text in _IMPORT_LOGS]
    for logger, rule in filters:
        logger.addFilter(rule)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_IMPORT_WARNING, category=DeprecationWarning)
            yield
    finally:
        for logger, rule in filters:
            logger.removeFilter(rule)


def int8_dynamic(*, per_tensor: bool = False, asymmetric: bool = False) -> Any:
    """Int8 weights per channel, activations dynamically quantized per token or per tensor."""
    from torchao.quantization import (  # noqa: PLC0415
        Int8DynamicActivationInt8WeightConfig,
        MappingType,
        PerRow,
        PerTensor,
    )

    return Int8DynamicActivationInt8WeightConfig(
        granularity=[PerTensor() if per_tensor else PerRow(), PerRow()],
        act_mapping_type=MappingType.ASYMMETRIC if asymmetric else MappingType.SYMMETRIC,
        # torchao would set options of Inductor for the whole process.
        set_inductor_config=False,
    )


def int8_static(scale: torch.Tensor) -> Any:
    """Int8 weights per channel, activations with one static scale of the activation's rank."""
    from torchao.quantization import (  # noqa: PLC0415
        Int8StaticActivationInt8WeightConfig,
        PerRow,
        PerTensor,
    )

    return Int8StaticActivationInt8WeightConfig(
        act_quant_scale=scale, granularity=[PerTensor(), PerRow()], set_inductor_config=False
    )


def int8_weights(group_size: int | None) -> Any:
    """Int8 weights per channel or per group, float activations."""
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup, PerRow  # noqa: PLC0415

    return Int8WeightOnlyConfig(
        granularity=PerGroup(group_size) if group_size else PerRow(), set_inductor_config=False
    )


def int_weights(bits: int, group_size: int | None, *, asymmetric: bool = False) -> Any:
    """n-bit weights per channel or per group, float activations."""
    from torchao.quantization import IntxWeightOnlyConfig  # noqa: PLC0415

    return IntxWeightOnlyConfig(
        weight_dtype=_INT[bits],
        granularity=_channels_or_groups(group_size),
        mapping_type=_mapping(asymmetric=asymmetric),
    )


def int8_dynamic_int_weights(bits: int, group_size: int | None, *, asymmetric: bool = False) -> Any:
    """n-bit weights, asymmetric int8 activations dynamically quantized per token."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig  # noqa: PLC0415

    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=_INT[bits],
        weight_granularity=_channels_or_groups(group_size),
        weight_mapping_type=_mapping(asymmetric=asymmetric),
    )


def packed_int4_weights(group_size: int) -> Any:
    """Asymmetric int4 weights per group, packed for aten's CPU matmul, float activations."""
    from torchao.prototype.quantization.int4.inference_workflow import (  # noqa: PLC0415
        PrototypeInt4WeightOnlyConfig,
    )

    return PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)


def _channels_or_groups(group_size: int | None) -> Any:
    from torchao.quantization import PerAxis, PerGroup  # noqa: PLC0415

    return PerGroup(group_size) if group_size else PerAxis(0)


def _mapping(*, asymmetric: bool) -> Any:
    from torchao.quantization import MappingType  # noqa: PLC0415

    return MappingType.ASYMMETRIC if asymmetric else MappingType.SYMMETRIC


def float8_weights() -> Any:
    """Float8 e4m3 weights per channel, float activations."""
    from torchao.quantization import Float8WeightOnlyConfig  # noqa: PLC0415

    return Float8WeightOnlyConfig(set_inductor_config=False)


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether a weight is one of torchao's quantized tensors already."""
    from torchao.utils import TorchAOBaseTensor  # noqa: PLC0415

    return isinstance(weight, TorchAOBaseTensor)


def quantize_linears(model: nn.Module, names: frozenset[str], config: Any) -> None:
    """Quantize, in place, the linear layers of `model` that have these names."""
    from torchao.quantization import quantize_  # noqa: PLC0415

    quantize_(model, config, filter_fn=lambda _, name: name in names)


def _x86_quantizer(*, dynamic: bool) -> Any:
    """Return X86InductorQuantizer with its default config for all supported ops.

    Importing its module silently installs a custom pass in `torch._inductor.config`, which is
    undone here.
    """
    import torch._inductor.config as inductor  # noqa: PLC0415

    with inductor.patch(pre_grad_custom_pass=inductor.pre_grad_custom_pass), quiet_imports():
        from torchao.quantization.pt2e.quantizer import (  # noqa: PLC0415
            x86_inductor_quantizer as x86,
        )
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    return quantizer


def prepare_model(program: torch.export.ExportedProgram, *, dynamic: bool) -> torch.fx.GraphModule:
    """Return the program as a module with the observers of X86InductorQuantizer."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e  # noqa: PLC0415

    module = program.module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule), type(module)
    # These hold for the dtypes of the trace, and would refuse the module under autocast.
    checks = torch.ops.aten._assert_tensor_metadata.default
    for node in module.graph.find_nodes(op="call_function", target=checks):
        module.graph.erase_node(node)
    # The quantizer crashes on a dead pattern, such as the pooler of a BERT whose result is dropped.
    module.graph.eliminate_dead_code()
    module.recompile()
    prepared: torch.fx.GraphModule = prepare_pt2e(module, _x86_quantizer(dynamic=dynamic))
    return prepared


def convert(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the observed module quantized, without the unused float weights."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e  # noqa: PLC0415

    with _without_training_patterns():
        converted: torch.fx.GraphModule = convert_pt2e(prepared)
    # `convert_pt2e` leaves the float parameters in the module, beside the quantized weights.
    read = {str(node.target) for node in converted.graph.find_nodes(op="get_attr")}
    for name, _ in list(converted.named_parameters(remove_duplicate=False)):
        if name not in read:
            path, _, leaf = name.rpartition(".")
            delattr(converted.get_submodule(path), leaf)
    return converted


@contextlib.contextmanager
def _without_training_patterns() -> Iterator[None]:
    """Run a block in which PT2E does not look for the batch norms of quantization-aware training.

    If a batch norm is left, as in a DenseNet, it spends half a minute on exporting 96 patterns;
    without training there is nothing to find.
    """
    from torchao.quantization.pt2e import quantize_pt2e  # noqa: PLC0415

    fold = quantize_pt2e._fold_conv_bn_qat
    quantize_pt2e._fold_conv_bn_qat = lambda module: module
    try:
        yield
    finally:
        quantize_pt2e._fold_conv_bn_qat = fold
