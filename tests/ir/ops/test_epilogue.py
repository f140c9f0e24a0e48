from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.check import problems_of
from qfuse.ir.ops.epilogue import Act, Add, Epilogue, EpilogueOp, Mul, Prelu, Round, Stored
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.quant.reference import dequantize
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor, stored_like

F32, BF16 = torch.float32, torch.bfloat16
SPEC = per_tensor(2, torch.uint8)
STEPS: list[tuple[str, EpilogueOp]] = [
    (f"add(0,1.0,stored,1,2,{SPEC})", Add(0, 1.0, Stored(1, 2, SPEC))),
    (f"add(3,-0.5,stored,1,-,{SPEC})", Add(3, -0.5, Stored(1, None, SPEC))),
    (f"mul(0,stored,1,2,{SPEC})", Mul(0, None, Stored(1, 2, SPEC))),
    (f"mul(0,1,2,{SPEC})", Mul(0, Round(1, 2, SPEC))),
    (f"round(1,-,{SPEC})", Round(1, None, SPEC)),
    ("add(2,1.0)", Add(2)),
    ("mul(1)", Mul(1)),
    ("prelu(1)", Prelu(1)),
    ("act(elu,0.5,1.5,1.0)", Act("elu", (0.5, 1.5, 1.0))),
    ("act(mish)", Act("mish")),
    ("act(quick_gelu,1.702)", Act("quick_gelu", (1.702,))),
    ("act(hardtanh,-inf,6.0)", Act("hardtanh", (-math.inf, 6.0))),
]


@pytest.mark.parametrize(("text", "step"), STEPS)
def test_a_step_and_its_text(text: str, step: EpilogueOp) -> None:
    assert str(step) == text
    assert Epilogue.parse(text).ops == (step,)
    assert Epilogue.parse(f"act(relu)|{text}|cast(bfloat16)").ops[1] == step


@pytest.mark.parametrize(
    "text",
    [
        "add(0)",
        "add(0,1.0,)",
        "add(0,1.0,2)",
        f"add(0,1.0,1,2,{SPEC})",
        f"add(0,1.0,stored,1,{SPEC})",
        "add(0,1.0,stored,1,2,int8)",
        "mul()",
        "mul(0,)",
        "prelu()",
        "prelu(0,1.0)",
        "mul(0,stored)",
        f"mul(0,stored,x,2,{SPEC})",
        "act(unknown)",
        "glu(relu)",
        "glu(unknown,gate-first)",
        "halves(0)",
        "act(relu",
    ],
)
def test_refuses_other_texts(text: str) -> None:
    with pytest.raises(NormalizeError):
        Epilogue.parse(text)


def test_a_quantized_factor_is_not_rounded() -> None:
    with pytest.raises(NormalizeError, match="not rounded"):
        Mul(0, Round(1, None, SPEC), Stored(1, None, SPEC))


def test_a_stored_operand_has_one_level_of_scales() -> None:
    text = "float4_e2m1[-6,6] 1x16 float32 float32:divide:round-zp none e4m3"
    assert Stored(0, None, QuantSpec.parse(text)).spec.outer is None
    with pytest.raises(NormalizeError, match="one level"):
        Stored(0, None, QuantSpec.parse(f"{text} outer=*x*"))


@pytest.mark.numeric
@pytest.mark.parametrize("zero", [None, 7])
@pytest.mark.parametrize("float_dtype", [F32, BF16])
@pytest.mark.parametrize("alpha", [1.0, -0.75])
def test_a_stored_operand_counts_as_its_dequantized_value(
    zero: int | None, float_dtype: torch.dtype, alpha: float
) -> None:
    spec = per_tensor(2, torch.uint8, float_dtype=float_dtype)
    q, scale = stored_like(spec, 3, 4), torch.tensor([[0.037]])
    point = None if zero is None else torch.tensor([[zero]], dtype=torch.int32)
    y, other = torch.randn(3, 4), dequantize(q, scale, point, spec)
    extras = [q, scale, *([] if point is None else [point])]
    stored = Stored(1, None if zero is None else 2, spec)
    added, product = Epilogue((Add(0, alpha, stored),)), Epilogue((Mul(0, stored=stored),))

    assert torch.equal(added.apply(y, extras), torch.add(y, other, alpha=alpha))
    assert torch.equal(product.apply(y, extras), y * other)
    for epilogue in (added, product):
        assert epilogue.float_types(BF16, extras) == (BF16, float_dtype)
        (wide,) = epilogue.widened().ops
        assert isinstance(wide, (Add, Mul))
        assert wide.stored == Stored(1, stored.zero_point, spec.widened())


@pytest.mark.numeric
@pytest.mark.parametrize("float_dtype", [F32, BF16, torch.float16])
def test_activations_are_those_of_torch(float_dtype: torch.dtype) -> None:
    y = torch.tensor([-30.0, -2.0, -0.5, -0.0, 0.0, 1e-3, 3.0, 40.0, torch.inf, torch.nan]).to(
        float_dtype
    )
    known = {
        "act(elu,0.5,1.0,1.0)": F.elu(y, 0.5),
        "act(mish)": F.mish(y),
        "act(quick_gelu,1.0)": F.silu(y),
        "act(hardtanh,-inf,1.0)": y.clamp(max=1.0),
    }
    for text, want in known.items():
        made = Epilogue.parse(text).apply(y, [])

        assert made.dtype is float_dtype
        torch.testing.assert_close(made, want, equal_nan=True)


@pytest.mark.numeric
@pytest.mark.parametrize("float_dtype", [F32, BF16])
def test_slopes_broadcast_and_promote(float_dtype: torch.dtype) -> None:
    y = torch.randn(2, 3, 4, 5).to(float_dtype)
    y[0, 0, 0, :3] = torch.tensor([torch.nan, 0.0, -torch.inf])
    slopes = torch.randn(3, dtype=float_dtype)
    epilogue = Epilogue((Prelu(0),))
    made = epilogue.apply(y, [slopes.reshape(3, 1, 1)])

    assert torch.equal(made.nan_to_num(7), F.prelu(y, slopes).nan_to_num(7))
    assert epilogue.float_types(BF16, [slopes]) == (BF16, float_dtype)
    assert epilogue.apply(y, [slopes.double().reshape(3, 1, 1)]).dtype is torch.float64


def problems(dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
    """Check a linear whose residual has a dtype, with scales of a shape."""
    b = GraphBuilder()
    x, w = b.arg("x", F32, 2, 8), b.const("w", torch.randn(4, 8))
    q, scale = b.arg("q", dtype, 2, 4), b.const("scale", torch.full(shape, 0.1))
    epilogue = Epilogue((Add(0, 1.0, Stored(1, None, SPEC)),))
    op = FusedLinear(x, x, None, w, None, None, None, epilogue, (q, scale))
    made: Any = op.overload
    op = FusedLinear(
        b.call(made, *op.call_args()), *[getattr(op, f.name) for f in op.layout.fields]
    )
    return list(problems_of(op))


def test_a_stored_operand_is_verified() -> None:
    assert problems(torch.uint8, (1, 1)) == []
    (dtype,) = problems(torch.int8, (1, 1))
    assert dtype.startswith("quantized values are torch.int8")
    (shape,) = problems(torch.uint8, (2, 1))
    assert "scale of shape" in shape
