"""The report as one HTML file that needs no network and no server."""

from qfuse.report.page.html import page_html

__all__ = ["page_html"]
