"""Renders the page: a template with the styles, the scripts and the data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import DictLoader, Environment, StrictUndefined

from qfuse.profile import Profile
from qfuse.report.page.data import page_data

if TYPE_CHECKING:
    from qfuse.report.report import Report

_SCRIPTS = ("model", "list", "sites", "lanes", "details", "charts", "main")
# Whatever ends a script element or starts a comment in it, and the line ends of old JavaScript.
_UNSAFE = str.maketrans({c: f"\\u{ord(c):04x}" for c in ("<", ">", "&", "\u2028", "\u2029")})


def page_html(
    report: Report, profile: Profile | None = None, sqnr: Mapping[str, float] | None = None
) -> str:
    """Return a report as an HTML page.

    Args:
        report: The report.
        profile: Measured times, for the tables, the overlays and the timeline.
        sqnr: The signal-to-noise ratio in dB by path of the module, for an overlay.
    """
    styles = _read("page.css")
    scripts = "\n".join(_read("js", f"{name}.js") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{scripts}}})();\n'
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; "
    environment = Environment(
        loader=DictLoader({"page": _read("page.html.j2")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = page_data(report, profile, sqnr or {})
    return environment.get_template("page").render(
        data=data,
        policy=policy + "base-uri 'none'; form-action 'none'",
        styles=styles,
        script=script,
        json=_json(data),
    )


def _json(data: Mapping[str, Any]) -> str:
    """Return data as JSON that cannot end the element which it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_UNSAFE)


def _read(*path: str) -> str:
    folder = resources.files("qfuse.report.page")
    return folder.joinpath(*path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
