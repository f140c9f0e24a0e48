"""The files that a benchmark writes: all that it measured, and a section of a page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfuse.ir.errors import OptionsError
from qfuse.ir.files import replaceable_file
from qfuse.targets import write_atomically
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
        OptionsError: The page does not exist, lacks the section or cannot be written, or the file
            has no folder.
    """

    section: str
    page: Path | None = None
    json: Path | None = None
    template: str = ""
    kind: MachineClass | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be written."""
        if self.json is not None:
            replaceable_file(self.json)
        if self.page is not None:
            check_section(self.page, self.section)
        for path in filter(None, (self.json, self.page)):
            if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
                raise OptionsError(
                    "it cannot be written: permission denied",
                    where=str(path),
                    fix="give a path in a folder that you may write to",
                )

    def write(self, data: Mapping[str, Any] | None = None, **values: Any) -> None:
        """Write what was asked for.

        Args:
            data: JSON values of all that was measured.
            **values: What the template shows.
        """
        if self.json is not None and data is not None:
            # A run that goes on later needs the file whole, whenever this one ends.
            write_atomically(replaceable_file(self.json), json.dumps(data, indent=1))
        if self.page is not None:
            write_section(self.page, self.section, self.template, kind=self.kind, **values)
