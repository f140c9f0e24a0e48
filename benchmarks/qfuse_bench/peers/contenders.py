"""The contenders: the same model under each engine, at each float dtype.

===================  ==============================================================================
eager                the module as it is
inductor             ``torch.compile`` with freezing and without gradients, for fixed sizes; on a
                     quantized model with torchao's patterns for x86 registered
inductor-tuned       the same with ``max_autotune``: Inductor's own templates for matrix products
inductor-qfuse       as inductor, with :func:`qfuse.inductor_options`
qfuse                :func:`qfuse.compile`
openvino             :mod:`qfuse_bench.peers.openvino`
onnxruntime          :mod:`qfuse_bench.peers.onnxruntime`
===================  ==============================================================================

``bf16`` is a model whose weights were cast before it was quantized, so everything that is not
quantized is computed in bf16. A model quantized through PT2E is a graph of float32 operators;
there bf16 is the same graph under autocast, as torchao documents it; or, for qfuse, the float32
graph with ``float_dtype=torch.bfloat16``, if the contender is ``narrowed``.

Another peer is one more engine here and one more builder in :mod:`qfuse_bench.peers.torch`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

from qfuse.ir.errors import OptionsError
from qfuse.zoo import convnets
from qfuse_bench.harness._torch_api import has_cpu_kernel
from qfuse_bench.harness.comparison import Competitor

FACTORY = "qfuse_bench.peers.torch:build"
"""What makes a contender in a worker."""

CALIBRATION_SEEDS = range(101, 105)
"""Seeds of calibration inputs, the same for all; none of them is the seed of measured inputs."""

_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnx", "onnxscript")}
)

# Recipes that go through PT2E, and what each is called under bf16 autocast.
_PT2E_UNDER_BF16 = {"w8a8-static": "w8a8-static-bf16"}
_PT2E = frozenset({*_PT2E_UNDER_BF16, "pt2e-dynamic"})


class Engine(StrEnum):
    """What runs a model."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    INDUCTOR_TUNED = "inductor-tuned"
    INDUCTOR_QFUSE = "inductor-qfuse"
    QFUSE = "qfuse"
    OPENVINO = "openvino"
    ONNX_RUNTIME = "onnxruntime"


class FloatType(StrEnum):
    """What everything that is not quantized is computed in."""

    F32 = "f32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One model under one engine.

    Attributes:
        engine: What runs it.
        float_type: What is not quantized is computed in this.
        model: Name in the zoo.
        sizes: Sizes of the model and its inputs.
        recipe: How it is quantized; ``None`` for the float model.
        dynamic: Quantize and compile for all sizes of the inputs that the model allows.
        without: What qfuse has to do without: see :class:`qfuse.Options`.
        group_size: Weights per scale, where the recipe has groups; ``None`` for its default.
        narrowed: The model is one of float32, and qfuse runs what is not quantized in bf16.
    """

    engine: Engine
    float_type: FloatType
    model: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    recipe: str | None = None
    dynamic: bool = False
    without: tuple[str, ...] = ()
    group_size: int | None = None
    narrowed: bool = False

    @property
    def name(self) -> str:
        """How tables call it: ``inductor bf16 w8a8-dynamic``."""
        more = (
            f"g{self.group_size}" if self.group_size else None,
            "narrowed" if self.narrowed else None,
            f"without {len(self.without)}" if self.without else None,
        )
        return " ".join(filter(None, (self.engine, self.float_type, self.recipe, *more)))

    @property
    def is_convnet(self) -> bool:
        """Whether the model is a convolutional network."""
        return self.model in convnets.FAMILIES

    @property
    def zoo_recipe(self) -> str | None:
        """The zoo's recipe for this float type."""
        if self.recipe in _PT2E and self.float_type is FloatType.BF16 and not self.narrowed:
            if self.recipe not in _PT2E_UNDER_BF16:
                raise OptionsError(
                    f"recipe {self.recipe!r} has no bf16 form", fix="measure it at f32 only"
                )
            return _PT2E_UNDER_BF16[self.recipe]
        return self.recipe

    @property
    def casts_weights(self) -> bool:
        """Whether bf16 means weights and inputs in bf16, and not autocast."""
        if self.narrowed:
            return False
        return self.float_type is FloatType.BF16 and self.recipe not in _PT2E

    def competitor(self, like: str | None = None, *, timed: bool = True) -> Competitor:
        """Return what takes part in a contest; the arguments are those of the entrant."""
        return Competitor(self.name, FACTORY, self.to_dict(), like, timed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave."""
        given = dict(values)
        engine, float_type = Engine(given.pop("engine")), FloatType(given.pop("float_type"))
        without = tuple(given.pop("without", ()))
        return cls(engine=engine, float_type=float_type, without=without, **given)


def missing(engine: Engine) -> str | None:
    """Return what to do so that an engine can take part, or ``None`` if it can."""
    lacks = [name for name in _PACKAGES.get(engine, ()) if importlib.util.find_spec(name) is None]
    return f"not installed: pip install {' '.join(lacks)}" if lacks else None


def kernels_lacking() -> dict[str, str]:
    """Return the recipes of torchao that cannot run here because a kernel is missing, and why."""
    missing = {"torchao da8w4": "torchao::da8w4_linear_cpu"}
    return {
        recipe: f"this build of torchao has no CPU kernel {op}"
        for recipe, op in missing.items()
        if not has_cpu_kernel(op)
    }


def float_peers(model: str, sizes: Mapping[str, int]) -> list[Contender]:
    """Return what a float model is worth without and with ``torch.compile``."""
    peers = (
        (Engine.EAGER, FloatType.F32),
        (Engine.INDUCTOR, FloatType.F32),
        (Engine.INDUCTOR, FloatType.BF16),
    )
    return [
        Contender(engine=engine, float_type=float_type, model=model, sizes=sizes)
        for engine, float_type in peers
    ]


def eager_model(
    model: str,
    sizes: Mapping[str, int],
    recipe: str,
    *,
    dynamic: bool = False,
    group_size: int | None = None,
) -> Contender:
    """Return the quantized model in eager mode, which shows the effect of quantization."""
    return Contender(
        engine=Engine.EAGER,
        float_type=FloatType.F32,
        model=model,
        sizes=sizes,
        recipe=recipe,
        dynamic=dynamic,
        group_size=group_size,
    )


def quantized_pair(  # noqa: PLR0913 - a model, how it is quantized, and who runs it
    model: str,
    sizes: Mapping[str, int],
    recipe: str,
    float_type: FloatType,
    *,
    dynamic: bool = False,
    tuned: bool = False,
    group_size: int | None = None,
) -> list[Contender]:
    """Return the engines that run one quantized model at one float type.

    Args:
        model: Name in the zoo.
        sizes: Its sizes.
        recipe: How it is quantized.
        float_type: What is not quantized is computed in this.
        dynamic: Let qfuse compile for all sizes; Inductor always gets fixed ones, its best case.
        tuned: Add Inductor with ``max_autotune``.
        group_size: Weights per scale; ``None`` for the recipe's default.
    """
    engines = [Engine.INDUCTOR, *([Engine.INDUCTOR_TUNED] if tuned else []), Engine.QFUSE]
    return [
        Contender(
            engine=engine,
            float_type=float_type,
            model=model,
            sizes=sizes,
            recipe=recipe,
            dynamic=dynamic and engine is Engine.QFUSE,
            group_size=group_size,
        )
        for engine in engines
    ]
