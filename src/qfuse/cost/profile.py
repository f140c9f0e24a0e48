"""The speeds of a machine that the cost model uses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from qfuse.cost.rates import ProductRates, RowRate, best_rates, rates_as_json, rates_from_json
from qfuse.cost.work import ProductKind
from qfuse.ir.errors import OptionsError
from qfuse.ir.files import parse_json
from qfuse.ir.units import bytes_text, rate_text, seconds_text


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Speeds of one machine with one number of threads.

    Attributes:
        machine: :meth:`qfuse.targets.Target.machine_fingerprint` of the machine.
        threads: Threads per operator during the measurement.
        memory_bandwidth: B/s of reads from memory.
        cache_bandwidth: B/s of reads from the last-level cache.
        cache_bytes: Activations up to this size are assumed to still be cached when they are read.
        f32_flops: FLOP/s of a large f32 matmul.
        f32_flops_one_row: The same for a matmul with one row, weights in the cache.
        bf16_flops: FLOP/s of a large bf16 matmul.
        bf16_flops_one_row: The same for a matmul with one row.
        int8_ops: OP/s of a large int8 matmul: of qfuse's own kernel if it is loaded, with the
            instruction set that it uses.
        int8_ops_one_row: The same for a matmul with one row.
        call_seconds: Overhead of an operator call.
        library_call_seconds: The same for an operator that sets up a oneDNN primitive.
        python_call_seconds: What a call of a kernel of qfuse from Python takes more than a trivial
            operator. It is not counted in predictions, since compiled graphs call kernels directly.
        quiet: Whether the machine was free of other load while measuring. If ``False``, the rates
            are extrapolated from one thread.
        measured_seconds: Duration of the measurement; 0 for a profile that was not measured.
        products: Rates by number of rows, which replace the ones above for these products.
    """

    machine: str
    threads: int
    memory_bandwidth: float
    cache_bandwidth: float
    cache_bytes: int
    f32_flops: float
    f32_flops_one_row: float
    bf16_flops: float
    bf16_flops_one_row: float
    int8_ops: float
    int8_ops_one_row: float
    call_seconds: float
    library_call_seconds: float
    quiet: bool
    measured_seconds: float
    products: tuple[ProductRates, ...] = ()
    python_call_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in (*_RATES, *_PRICES, "cache_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise OptionsError(f"{name} of a cost profile must be positive, not {value!r}")
        if not (math.isfinite(self.python_call_seconds) and self.python_call_seconds >= 0):
            raise OptionsError("python_call_seconds of a cost profile must not be negative")
        if len({one.product for one in self.products}) != len(self.products):
            raise OptionsError("a cost profile has rates of one product twice")
        # In one order, so that profiles with the same rates are equal.
        ordered = tuple(sorted(self.products, key=lambda one: one.product))
        object.__setattr__(self, "products", ordered)

    def rates_of(self, product: ProductKind | None) -> ProductRates | None:
        """Return the rates of a product; ``None`` if they were not measured."""
        return next((one for one in self.products if one.product is product), None)

    @classmethod
    def pinned(cls) -> CostProfile:
        """Constants for tests, so that decisions there do not depend on the machine.

        Rounded measurements of two otherwise idle cores of a fourth-generation AMD EPYC (AVX512
        with VNNI, no AMX).
        """
        return cls(
            machine="pinned",
            threads=2,
            memory_bandwidth=25e9,
            cache_bandwidth=130e9,
            cache_bytes=16 << 20,
            f32_flops=182e9,
            f32_flops_one_row=12e9,
            bf16_flops=425e9,
            bf16_flops_one_row=33e9,
            int8_ops=860e9,
            int8_ops_one_row=180e9,
            call_seconds=1e-6,
            library_call_seconds=20e-6,
            quiet=True,
            measured_seconds=0.0,
            # Its rows share no loads.
            products=(
                ProductRates(ProductKind.ATEN_F32_INT8, (RowRate(1, 12e9),)),
                ProductRates(ProductKind.ATEN_BF16_INT8, (RowRate(1, 12e9),)),
            ),
        )

    def best_of(self, other: CostProfile) -> CostProfile:
        """Return the better of each speed, for busy machines: noise only makes them slower.

        Raises:
            OptionsError: The profiles have different machines or thread counts.
        """
        if (self.machine, self.threads) != (other.machine, other.threads):
            raise OptionsError(f"profiles of {self.machine} and {other.machine} do not combine")
        best: dict[str, Any] = asdict(self)
        best.update({name: max(getattr(self, name), getattr(other, name)) for name in _RATES})
        best.update({name: min(getattr(self, name), getattr(other, name)) for name in _PRICES})
        best["python_call_seconds"] = min(self.python_call_seconds, other.python_call_seconds)
        best["products"] = best_rates(self.products, other.products)
        best["quiet"] = self.quiet and other.quiet
        return CostProfile(**best)

    def describe(self) -> list[tuple[str, str]]:
        """Return label and value of each speed for display."""
        return [
            ("threads", str(self.threads)),
            ("memory", rate_text(self.memory_bandwidth)),
            ("cache", f"{rate_text(self.cache_bandwidth)} up to {bytes_text(self.cache_bytes)}"),
            ("f32", _rates_text(self.f32_flops, self.f32_flops_one_row)),
            ("bf16", _rates_text(self.bf16_flops, self.bf16_flops_one_row)),
            ("int8", _rates_text(self.int8_ops, self.int8_ops_one_row)),
            *((f"{one.product}, weights in memory", str(one)) for one in self._shown()),
            ("operator call", seconds_text(self.call_seconds)),
            ("oneDNN call", seconds_text(self.library_call_seconds)),
            ("measured", self._measured_text()),
        ]

    def _shown(self) -> Iterable[ProductRates]:
        """Yield the rates of qfuse's kernels and of float products."""
        return (one for one in self.products if not one.product.startswith("aten."))

    def _measured_text(self) -> str:
        if not self.measured_seconds:
            return "no, fixed"
        state = "on a quiet machine" if self.quiet else "under background load"
        return f"in {self.measured_seconds:.1f} s {state}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self) | {"products": rates_as_json(self.products)}

    def to_json(self) -> str:
        """Serialize for :meth:`from_json`."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`.

        Raises:
            OptionsError: The text is not a cost profile.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise OptionsError(f"this is not a cost profile: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Build a profile from the output of :meth:`to_dict`.

        Raises:
            OptionsError: A field is missing, unknown, of the wrong type or not positive.
        """
        names = {field.name: str(field.type) for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != set(names):
            raise OptionsError("this is not a cost profile: its fields differ")
        data = data | {"products": rates_from_json(data["products"])}
        for name, kind in names.items():
            if name == "products":
                continue
            # By exact type, since a bool is an int in Python.
            if type(data[name]).__name__ not in ({"int", "float"} if kind == "float" else {kind}):
                raise OptionsError(f"{name} of a cost profile must be {kind}, not {data[name]!r}")
        return cls(**data)


_RATES = (
    "memory_bandwidth",
    "cache_bandwidth",
    "f32_flops",
    "f32_flops_one_row",
    "bf16_flops",
    "bf16_flops_one_row",
    "int8_ops",
    "int8_ops_one_row",
)
_PRICES = ("call_seconds", "library_call_seconds")


def _rates_text(many_rows: float, one_row: float) -> str:
    return f"{rate_text(many_rows, 'OP')}, one row {rate_text(one_row, 'OP')}"
