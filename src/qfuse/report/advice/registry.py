"""All suggestions; the first that answers a cause is shown.

Each one has an entry in docs/report.md, and an example in tests/report/advice that follows it and
sees the op fused.
"""

from __future__ import annotations

from collections.abc import Mapping

from qfuse.ir.events import MissCode
from qfuse.kernels.weight_only import GROUP_MULTIPLE
from qfuse.report.advice.advice import LOOKED_UP, OF_A_MODULE, OF_AN_EINSUM, Advice, Cause

_QUANTIZED = (
    Advice(
        "quantize-weight",
        "quantize it: quantize_(model, Int8DynamicActivationInt8WeightConfig())",
        (MissCode.NOT_QUANTIZED,),
        f"^the weight is not quantized; {OF_A_MODULE}",
        "linear|matmul|mm",
    ),
    Advice(
        "quantize-convolution",
        "quantize it by PT2E (convert_pt2e), or by hand: w_int8.float() * scale",
        (MissCode.NOT_QUANTIZED,),
        f"^the weight is not quantized; {OF_A_MODULE}",
        "convolution",
    ),
    Advice(
        "quantize-parameter",
        "make it the weight of an nn.Linear or a convolution, and quantize that",
        (MissCode.NOT_QUANTIZED,),
        "^the weight is not quantized; $",
    ),
    Advice(
        "recurrent-as-linears",
        "write its steps with nn.Linear, and quantize these",
        (MissCode.NOT_QUANTIZED,),
        "a recurrent layer multiplies in float",
    ),
    Advice(
        "weight-on-the-right",
        "multiply from the right: torch.bmm(x.mT, weights.mT).mT",
        (MissCode.PATTERN,),
        "the left operand is a constant, this op multiplies two activations",
    ),
    Advice(
        OF_AN_EINSUM,
        "if it sums axes of both, write it with linear or bmm, and permute x",
        (None,),
        r"^aten\.einsum uses this weight",
        "left dequantize",
    ),
    Advice(
        "quantize-both",
        "quantize the weight too, with scales that are constants",
        (MissCode.NOT_QUANTIZED,),
        "the activation is quantized but the weight is",
    ),
    Advice(
        "quantize-last",
        "change the weight before quantizing it: kernels read w_int8 * scale",
        (MissCode.NOT_QUANTIZED,),
        "and is not a dequantize of them",
    ),
    Advice(
        LOOKED_UP,
        "quantize the activations too: both are then read by an int8 kernel",
        (MissCode.NOT_QUANTIZED, None),
        "no kernel multiplies float activations by such weights",
    ),
    Advice(
        "quantize-other-operand",
        "quantize that operand too: torch.clamp(torch.round(x / s), -128, 127)",
        (MissCode.NOT_QUANTIZED,),
        "operand is torch.*, the other one is quantized",
    ),
    Advice(
        "scale-before-product",
        "scale the weights before the product: w.float() * scale",
        (MissCode.NOT_QUANTIZED,),
        "are not scaled before the product",
    ),
    Advice(
        "constant-weight",
        "make the weight a buffer: quantize it before exporting the model",
        (MissCode.NOT_CONSTANT,),
        "the weight is computed at run time",
    ),
)

_WRITTEN_OUT = (
    Advice(
        "round-to-nearest",
        "round to the nearest integer: torch.round(x / scale)",
        # Where the values are clamped first, the sentence is that of the missing clamp.
        (MissCode.PATTERN, MissCode.RANGE),
        r"aten\.round.* found aten\.(floor|ceil|trunc)",
    ),
    Advice(
        "clamp-before-cast",
        "clamp before the cast: torch.clamp(torch.round(x / scale), -128, 127)",
        (MissCode.RANGE,),
        "before the cast to integers.*the cast is undefined",
        "quantize-chain",
    ),
    Advice(
        "cast-to-8-bits",
        "cast it before the product: torch.clamp(...).to(torch.int8).float() * s",
        (MissCode.DTYPE,),
        "expected a cast to int8 or uint8",
        "quantize-chain|dequantize-scaled-operand",
    ),
    Advice(
        "quantize-without-eager-mode",
        "use the ops of torch.ops.quantized_decomposed, as PT2E does",
        (None,),
        "a quantized tensor of eager mode",
        "import",
    ),
    Advice(
        "clamp-to-the-range",
        "clamp to a range of the type: -128 to 127, -127 to 127, or 0 to 255",
        (MissCode.RANGE,),
        "the clamp .* is not a range of",
    ),
    Advice(
        "integer-zero-point",
        "round the zero point to an integer when choosing the parameters",
        (MissCode.ZERO_POINT,),
        "the zero point is not an integer",
    ),
    Advice(
        "zero-point-in-range",
        "clamp the zero point to the range when choosing the parameters",
        (MissCode.ZERO_POINT, MissCode.NO_KERNEL),
        r"the zero point is outside of \[|zero point may be outside \[|not known to lie in \[",
    ),
    Advice(
        "zero-point-as-integer",
        "pass the zero point as int8 or uint8, the dtype of the quantized values",
        (MissCode.NOT_CONSTANT,),
        "the zero point is neither a constant nor known to be an integer",
        "dequantize-(scaled-)?operand",
    ),
    Advice(
        "zero-point-before-scale",
        "subtract an integer zero point first: (q.float() - zero_point) * scale",
        (MissCode.ORDER,),
        "the zero point is subtracted behind the scale",
    ),
    Advice(
        "relu-before-scale",
        "if that is positive, apply it before: torch.relu(q.float()) * scale",
        (MissCode.RANGE,),
        "the sign of the scale is not known, so the ReLU stays after it",
    ),
    Advice(
        "quantize-behind-op",
        "quantize its result too: torch.clamp(torch.round(y / s), -128, 127)",
        (MissCode.NOT_QUANTIZED,),
        "between the scale and the product computes in",
    ),
    Advice(
        "mask-by-fill",
        "if it is a mask of zeros and ones: x.masked_fill(mask == 0, 0)",
        (MissCode.SHAPE,),
        "has one entry per element, so it is only a factor",
        "dequantize-(scaled-)?operand",
    ),
    Advice(
        "activation-in-8-bits",
        "pass it as int8 or uint8, or clamp it: torch.clamp(q, -128, 127)",
        (MissCode.RANGE,),
        "the activation is stored as .*, and not known to fit in 8 bits",
    ),
    Advice(
        "one-dtype-of-the-product",
        "leave out the cast to 16 bits, or compute the product in 16 bits too",
        (MissCode.ARITHMETIC,),
        "the scaled values are rounded to",
    ),
    Advice(
        "scale-as-tensor",
        "leave out .item(): multiply by the tensor",
        (MissCode.NOT_CONSTANT, MissCode.DTYPE),
        r"aten\.item, a number that is computed at run time",
    ),
    Advice(
        "least-scale",
        "give the maximum a least value: x.abs().amax(...).clamp(min=1e-12)",
        (MissCode.PATTERN,),
        "has no least value",
        "choose-chain",
    ),
    Advice(
        "scale-of-the-range",
        "divide the maximum by the largest quantized value: 127 for int8",
        (MissCode.RANGE,),
        "the scale divides by",
        "choose-chain",
    ),
    Advice(
        "integer-operands",
        "quantize both operands to int8 or uint8 before the integer product",
        (MissCode.DTYPE,),
        "expected int8 or uint8 for",
        "fuse-int-product",
    ),
)

_SCALES = (
    Advice(
        "one-scale-for-parts",
        "quantize all parts of the concatenation with the same scale",
        (MissCode.GRANULARITY,),
        "the parts have different scales",
    ),
    Advice(
        "one-quantize",
        "quantize the result once: the same scale and zero point for all users",
        (MissCode.SHARED,),
        r"own result is also used by qfuse\.quantize",
    ),
    Advice(
        "same-scale-on-both-sides",
        "use the same scale and zero point before and after",
        (None, MissCode.PROFIT, MissCode.ORDER),
        "it changes the parameters between two quantized ops",
    ),
)

_OPS = (
    Advice(
        "leaky-relu",
        "if it is a leaky ReLU, write torch.nn.functional.leaky_relu(x, slope)",
        (MissCode.SHARED,),
        r"own result is also used by aten\.maximum",
    ),
    Advice(
        "squared-relu",
        "write torch.relu(x) ** 2",
        (MissCode.ARITHMETIC,),
        "the square of a ReLU is NaN there",
    ),
    Advice(
        "multiply-by-the-reciprocal",
        "multiply by the reciprocal: x * (1 / number)",
        (MissCode.ARGUMENT,),
        "whose reciprocal is rounded",
    ),
    Advice(
        "attention-in-parts",
        "write matmul, softmax, quantize and matmul instead",
        (None,),
        "does not quantize the weights that it multiplies with the values",
    ),
    Advice(
        "float-op-between",
        "leave out the quantize and dequantize in front of it: it runs in float",
        (None,),
        "its float values are used by",
        "^left",
    ),
)

_KERNELS = (
    Advice(
        "own-kernels",
        "leave out own_kernels=False (--no-own-kernels)",
        (MissCode.NO_KERNEL,),
        "disabled by option",
    ),
    Advice(
        "weight-scale-per-output",
        "give the weight one scale per output feature (its axis 0)",
        (MissCode.NO_KERNEL,),
        "the weight's scales run along the input (features|channels)|"
        "the weight is scaled in blocks of .*, not per output channel",
    ),
    Advice(
        "group-size",
        f"choose a group size that divides the inputs: a multiple of {GROUP_MULTIPLE}",
        (MissCode.NO_KERNEL,),
        "groups must be whole, of a multiple of",
    ),
    Advice(
        "activation-scale-per-tensor",
        "give the activation one scale for all of it: x.abs().amax()",
        (MissCode.NO_KERNEL, MissCode.GRANULARITY),
        "the activation is scaled in blocks of .*, not per tensor|and a convolution reads one",
        "convolution|dequantize-scaled-operand",
    ),
    Advice(
        "activation-scale-per-row",
        "give the activation one scale for all of it, or one per row",
        (MissCode.NO_KERNEL, MissCode.GRANULARITY),
        "the activation is scaled in blocks|its scales have one entry per element together; ",
    ),
    Advice(
        "activation-of-8-bits",
        "quantize the activation to int8 or uint8",
        (MissCode.NO_KERNEL, None),
        r"the activation is stored as (?!torch\.u?int8)",
    ),
    Advice(
        "float32",
        "compute in float32: model.float(), and float32 inputs",
        (MissCode.NO_KERNEL,),
        "(is computed|computes) in (torch\\.)?float64",
    ),
    Advice(
        "cache-folder",
        "point QFUSE_CACHE_DIR at a folder that can be written to",
        (None,),
        "qfuse's own kernels are not available: the kernel cache cannot be used",
    ),
    Advice(
        "build-kernels",
        "run `qfuse build-kernels`: it builds them, or says what is missing",
        (None,),
        "qfuse's own kernels are not available",
    ),
)

_SETTINGS = (
    Advice(
        "switched-on",
        "leave out without=[...] (--without), if it names this rule",
        (MissCode.BANNED,),
        "it is switched off",
    ),
    Advice(
        "assumed-equality",
        'use real tensors, or equality="assumed"',
        (MissCode.NO_VALUES,),
    ),
)

ADVICE: tuple[Advice, ...] = (
    *_QUANTIZED,
    *_WRITTEN_OUT,
    *_SCALES,
    *_OPS,
    *_KERNELS,
    *_SETTINGS,
)

NEEDS_NONE: Mapping[MissCode, str] = {
    MissCode.AXIS: "a split, a merge or a sum runs along another axis, which the model needs",
    MissCode.SHAPE: "the shapes are those of the model",
    MissCode.PROFIT: "the rewrite is predicted to be slower, so nothing is lost",
}
"""Codes without a suggestion of their own, each with the reason."""


def advice_for(cause: Cause) -> Advice | None:
    """Return the suggestion for a cause, if there is one that helps."""
    return next((advice for advice in ADVICE if advice.answers(cause)), None)
