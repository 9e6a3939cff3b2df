"""Fill a page template and write the result as one HTML file that works offline."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from kfc.lab.report.figures import INK, area_style, line_style
from kfc.lab.report.tables import MISSING
from kfc.lab.runs import write_atomically

TEMPLATES = Environment(
    loader=PackageLoader("kfc.lab.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {"area_style": area_style, "line_style": line_style}
TEMPLATES.globals |= {"ink": INK, "missing": MISSING}
TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}


def write_html(
    path: Path, template: str, *, title: str, sections: Mapping[str, Any], introduction: str = ""
) -> None:
    """Write a page atomically, and create its folder if it is missing.

    Args:
        template: the file name of the page's template.
        sections: the data of each section, by its id; a section without data is left out.

    Raises:
        OSError: the file or its folder cannot be written.
    """
    folder = files("kfc.lab.report") / "templates"
    script, plotly = (folder / "page.js").read_text(encoding="utf-8"), get_plotlyjs()
    content = TEMPLATES.get_template(template).render(
        title=title,
        introduction=introduction,
        sections=sections,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=script,
        plotly=plotly,
        script_digests=[_digest(plotly), _digest(script)],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.encode())


def _digest(script: str) -> str:
    """Return the hash by which the page's content security policy allows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
