"""Fill a page template and write the result as one HTML file that works offline."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kfc.lab.disk import write_atomically
from kfc.lab.inspection.results import plain_values
from kfc.lab.report.figures import area_style, line_style
from kfc.lab.report.tables import MISSING

LOADER = PackageLoader("kfc.lab.report")
# Plotly's bundle for plots with two axes, a third of the one that the package plotly contains.
# `make vendor` replaces it.
PLOTLY = files("kfc.lab.report") / "vendor" / "plotly-cartesian.min.js.gz"
TEMPLATES = Environment(
    loader=LOADER,
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {"area_style": area_style, "line_style": line_style, "missing": MISSING}
TEMPLATES.policies["json.dumps_function"] = lambda value, **options: json.dumps(
    plain_values(value), allow_nan=False, separators=(",", ":")
)


def write_html(path: Path, template: str, *, sections: Mapping[str, Any], **values: Any) -> None:
    """Write a page atomically, and create its folder if it is missing.

    Args:
        template: the file name of the page's template.
        sections: the data of each section, by its id; a section without data is left out.
        values: other variables of the template, such as the page's title.

    Raises:
        OSError: the file or its folder cannot be written.
    """
    style, script = (LOADER.get_source(TEMPLATES, name)[0] for name in ("page.css", "page.js"))
    plotly = plotly_source()
    content = TEMPLATES.get_template(template).render(
        **values,
        sections=sections,
        style=style,
        script=script,
        plotly=plotly,
        script_digests=[_digest(plotly), _digest(script)],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of folders may contain bytes that are not UTF-8, which Python reads as surrogates.
    write_atomically(path, content.encode(errors="backslashreplace"))


@cache
def plotly_source() -> str:
    """Return the source of the plotting library, which every page contains."""
    return gzip.decompress(PLOTLY.read_bytes()).decode()


def _digest(script: str) -> str:
    """Return the hash by which the page's content security policy allows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
