"""Refuse models whose quantization is not finished, or is of a kind that cannot be traced."""

from __future__ import annotations

from torch import nn

from qfuse.ir.errors import CaptureError

# By name: PyTorch and torchao each have their own classes.
_OBSERVERS = frozenset({"ObserverBase", "FakeQuantizeBase"})
# Modules of eager mode and of FX graph mode, which hold packed weights.
_PACKED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
# Those of a reference model hold float weights, and may be written in decomposed ops.
_REFERENCE = "torch.ao.nn.quantized.reference."


def check_preparation(model: nn.Module) -> None:
    """Refuse a model with observers, or with quantized modules of eager mode.

    Raises:
        CaptureError: There is such a module; the message says what to call.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if not _OBSERVERS.isdisjoint(base.__name__ for base in kind.__mro__):
            raise CaptureError(
                f"the model was prepared for quantization and not converted: {name or 'it'} is "
                f"an observer ({kind.__name__})",
                fix="call convert_pt2e on a model from prepare_pt2e or prepare_qat_pt2e, or "
                "convert in another flow",
            )
        place = kind.__module__
        if place.startswith(_PACKED) and not place.startswith(_REFERENCE):
            raise CaptureError(
                f"{name or 'the model'} is a quantized module of eager mode ({place}."
                f"{kind.__name__}), which torch.export cannot trace",
                fix="quantize the float model with PT2E or torchao.quantization.quantize_",
            )
