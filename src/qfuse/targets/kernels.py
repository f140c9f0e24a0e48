"""Probes which operators have a kernel in this installation.

A schema is not a kernel: the PyPI wheel of torchao for x86 defines operators without CPU code, and
``hasattr(torch.ops.torchao, name)`` is true for all of them. So kernels are looked up in the
dispatcher, under the dispatch key of a real call.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from qfuse.ir.errors import OptionsError

_log = logging.getLogger(__name__)


class KernelState(StrEnum):
    """The availability of an operator.

    ``AVAILABLE``: a kernel is registered. ``SCHEMA_ONLY``: a call raises ``NotImplementedError``.
    ``ABSENT``: it is not defined. ``UNPROBED``: importing its package was not allowed.
    """

    AVAILABLE = "available"
    SCHEMA_ONLY = "schema-only"
    ABSENT = "absent"
    UNPROBED = "unprobed"


@dataclass(frozen=True, slots=True)
class KernelProbe:
    """An operator to look up.

    Attributes:
        name: ``namespace::op`` or ``namespace::op.overload``.
        dispatch_key: The dispatch key of a call on this device. Operators whose weight is packed by
            oneDNN dispatch to ``MkldnnCPU``; some only have a kernel for that key.
    """

    name: str
    dispatch_key: str = "CPU"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+::\w+(\.\w+)?", self.name):
            raise OptionsError(
                f"{self.name!r} is not an operator name",
                fix="write namespace::op or namespace::op.overload",
            )

    @property
    def namespace(self) -> str:
        """The part before ``::``."""
        return self.name.partition("::")[0]


KERNELS: tuple[KernelProbe, ...] = (
    KernelProbe("onednn::qlinear_prepack"),
    KernelProbe("onednn::qlinear_pointwise", "MkldnnCPU"),
    KernelProbe("onednn::qlinear_pointwise.tensor", "MkldnnCPU"),
    KernelProbe("onednn::qlinear_pointwise.binary", "MkldnnCPU"),
    KernelProbe("onednn::qlinear_pointwise.binary_tensor", "MkldnnCPU"),
    KernelProbe("onednn::qconv_prepack"),
    KernelProbe("onednn::qconv1d_pointwise", "MkldnnCPU"),
    KernelProbe("onednn::qconv2d_pointwise", "MkldnnCPU"),
    KernelProbe("onednn::qconv2d_pointwise.binary", "MkldnnCPU"),
    KernelProbe("onednn::qconv3d_pointwise", "MkldnnCPU"),
    KernelProbe("aten::_int_mm"),
    KernelProbe("aten::_scaled_mm"),
    KernelProbe("aten::_weight_int8pack_mm"),
    KernelProbe("aten::_weight_int4pack_mm_for_cpu"),
    KernelProbe("aten::_convert_weight_to_int4pack_for_cpu"),
    KernelProbe("aten::_dyn_quant_matmul_4bit"),
    KernelProbe("torchao::da8w4_linear_prepack_cpu"),
    KernelProbe("torchao::da8w4_linear_cpu"),
    KernelProbe("torchao::float8_linear_prepack_cpu"),
    KernelProbe("torchao::float8_linear_cpu"),
    KernelProbe("torchao::_scaled_embedding_bag"),
    KernelProbe("torchao::qscaled_dot_product"),
)

# Namespaces whose operators exist only once their package is imported.
_PACKAGES = {"torchao": "torchao"}


def probe_kernel(probe: KernelProbe) -> KernelState:
    """Probe one operator without importing packages."""
    from qfuse.targets import _torch_api  # noqa: PLC0415 - plans are compared without torch

    if not _torch_api.op_exists(probe.name):
        return KernelState.ABSENT
    if _torch_api.op_has_kernel(probe.name, probe.dispatch_key):
        return KernelState.AVAILABLE
    return KernelState.SCHEMA_ONLY


def probe_kernels(
    probes: Iterable[KernelProbe], *, import_packages: bool
) -> tuple[tuple[str, KernelState], ...]:
    """Probe operators, after importing the package of each namespace if allowed.

    The result does not depend on other imports of the process: without ``import_packages``, an
    operator of a package is ``UNPROBED`` even if the package is already imported.

    Args:
        probes: The operators to probe.
        import_packages: Import torchao (a second or so) if it is installed.

    Returns:
        Name and state, sorted by name.
    """
    states: dict[str, KernelState] = {}
    for probe in probes:
        # Asking the dispatcher would depend on whether someone else has imported the package.
        package = _PACKAGES.get(probe.namespace)
        if package is None or (import_packages and _importable(package)):
            states[probe.name] = probe_kernel(probe)
        else:
            states[probe.name] = KernelState.ABSENT if import_packages else KernelState.UNPROBED
    return tuple(sorted(states.items()))


def _importable(package: str) -> bool:
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        # The package was built for a different torch: only its kernels are unavailable.
        _log.warning("%s is installed but cannot be imported: %s", package, error)
        return False
    return True
