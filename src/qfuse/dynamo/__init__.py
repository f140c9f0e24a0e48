"""The backend of ``torch.compile(model, backend="qfuse")``, and its reports."""

from qfuse.dynamo.backend import backend
from qfuse.dynamo.journal import clear_reports, reports

__all__ = ["backend", "clear_reports", "reports"]
