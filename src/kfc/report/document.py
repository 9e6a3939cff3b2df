"""Sections as one self-contained HTML page: it needs no network to be read."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from kfc.experiments.runs import write_atomically
from kfc.report.figures import Figure, Json
from kfc.report.section import Section


def write_document(
    path: Path,
    sections: Sequence[Section],
    *,
    title: str,
    introduction: str = "",
    curves: Json | None = None,
) -> None:
    """All of it or nothing.

    Args:
        curves: what the script makes curves of, if there are any.

    Raises:
        OSError: the file or its folders cannot be written.
    """
    content = _fill(title, introduction, sections, curves)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.encode())


def _fill(title: str, introduction: str, sections: Sequence[Section], curves: Json | None) -> str:
    plotly, script = get_plotlyjs(), _read("page.js")
    figures = [_as_json(figure) for section in sections for figure in section.all_figures()]
    return Template(_read("page.html")).substitute(
        policy=_policy(plotly, script),
        title=escape(title),
        introduction=f"<p>{escape(introduction)}</p>" if introduction else "",
        style=_read("page.css"),
        links="".join(f'<li><a href="#{s.id}">{s.title}</a></li>' for s in sections),
        sections="\n".join(section.html() for section in sections),
        data=_embedded({"figures": figures, "curves": curves}),
        plotly=plotly,
        script=script,
    )


def _read(name: str) -> str:
    return files("kfc.report").joinpath(name).read_text(encoding="utf-8")


def _as_json(figure: Figure) -> Json:
    return {"id": figure.id, "layout": figure.layout, "variants": list(figure.variants)}


def _embedded(value: Json) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _policy(*scripts: str) -> str:
    """Only our own scripts run, and nothing is fetched, whatever stands in the runs' names."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
