"""One file per compiled model: its weights, code, call signature, report and example inputs."""

from qfuse.saving.container import SUFFIX, is_model_file
from qfuse.saving.digest import digest_of, digests_of
from qfuse.saving.load import read_model
from qfuse.saving.model import call_of
from qfuse.saving.storable import StorableModule, kept_examples

__all__ = [
    "SUFFIX",
    "StorableModule",
    "call_of",
    "digest_of",
    "digests_of",
    "is_model_file",
    "kept_examples",
    "read_model",
]
