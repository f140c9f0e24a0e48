"""The files that a benchmark writes: all that it measured, and a section of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfuse.ir.files import check_folder, write_output
from qfuse_bench.harness.machine_class import MachineClass
from qfuse_bench.report.markdown import check_section, write_section


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go. It is made before anything is measured, so wrong paths are told at once.

    Attributes:
        section: The section of the page.
        page: The Markdown page, or ``None``.
        json: The file of all that was measured, or ``None``.
        template: The template of the section, if it has another name.
        kind: The class of machine; by default that of this process.

    Raises:
        OptionsError: The page does not exist or lacks the section, or the file has no folder.
    """

    section: str
    page: Path | None = None
    json: Path | None = None
    template: str = ""
    kind: MachineClass | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be written."""
        if self.json is not None:
            check_folder(self.json)
        if self.page is not None:
            check_section(self.page, self.section)

    def write(self, data: Mapping[str, Any] | None = None, **values: Any) -> None:
        """Write what was asked for.

        Args:
            data: JSON values of all that was measured.
            **values: What the template shows.
        """
        if self.json is not None and data is not None:
            write_output(self.json, json.dumps(data, indent=1))
        if self.page is not None:
            write_section(self.page, self.section, self.template, kind=self.kind, **values)
