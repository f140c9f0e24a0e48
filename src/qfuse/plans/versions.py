"""The versions of the packages that take part in a compilation."""

from __future__ import annotations

from qfuse._version import __version__
from qfuse.extensions import Group, extension_origins
from qfuse.targets import Target


def package_versions(target: Target) -> dict[str, str]:
    """Return the version of qfuse, torch and torchao, and of every package that extends qfuse.

    Raises:
        ExtensionError: Two packages have entry points of one name.
    """
    import torch  # noqa: PLC0415 - plans are compared without it

    found = {"qfuse": __version__, "torch": torch.__version__}
    if target.torchao_version is not None:
        found["torchao"] = target.torchao_version
    origins = {origin for group in Group for origin in extension_origins(group).values()}
    for origin in sorted(origins):
        name, _, version = origin.partition(" ")
        found.setdefault(name, version)
    return found


def release(version: str) -> str:
    """Return a version without its local part: ``2.13.0`` of ``2.13.0+cpu``."""
    return version.partition("+")[0]
