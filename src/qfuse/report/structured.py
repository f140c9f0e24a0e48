"""The report as artifacts of torch's structured log, which tlparse shows."""

from __future__ import annotations

from qfuse.report._logging_api import is_traced, log_artifact
from qfuse.report.page import page_html
from qfuse.report.report import Report

REPORT, PAGE = "qfuse_report", "qfuse_page"


def log_report(report: Report) -> None:
    """Write the report and its page to the structured log, if ``TORCH_TRACE`` asks for one."""
    if is_traced():
        log_artifact(REPORT, "json", report.to_json)
        log_artifact(PAGE, "string", lambda: page_html(report, None, None))
