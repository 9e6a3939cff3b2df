"""Legends, and the form above the curves; ``page.js`` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kfc.report.styles import line_swatch


def curve_controls(names: Sequence[str], has_others: bool) -> str:
    """
    Args:
        names: of the runs; their indices are their looks.
        has_others: whether there are runs at other learning rates to show.
    """
    fieldsets = [
        _choices("axis", "Against", {"seconds": "time", "epoch": "epochs", "update": "updates"}),
        _choices("parameters", "Parameters", {name: name for name in ("averaged", "raw", "both")}),
        _choices("scale-y", "Losses and errors", {"log": "logarithmic", "linear": "linear"}),
        _choices("scale-x", "Horizontal axis", {"linear": "linear", "log": "logarithmic"}),
    ]
    if has_others:
        box = '<label><input type="checkbox" name="others">all learning rates</label>'
        fieldsets.append(_fieldset("More runs", box))
    fieldsets.append(_fieldset("Runs", "".join(map(_run_box, range(len(names)), names)), "legend"))
    return f'<form id="controls" class="controls" autocomplete="off">{"".join(fieldsets)}</form>'


def _choices(name: str, legend: str, choices: Mapping[str, str]) -> str:
    buttons = [
        f'<label><input type="radio" name="{name}" value="{value}"'
        f"{'' if index else ' checked'}>{words}</label>"
        for index, (value, words) in enumerate(choices.items())
    ]
    return _fieldset(legend, "".join(buttons))


def _run_box(index: int, name: str) -> str:
    return (
        f'<label><input type="checkbox" name="run" value="{index}" checked>'
        f"{line_swatch(index)}<span>{escape(name)}</span></label>"
    )


def _fieldset(legend: str, content: str, kind: str = "choice") -> str:
    return f'<fieldset class="{kind}"><legend>{legend}</legend>{content}</fieldset>'


def run_choice(names: Sequence[str]) -> str:
    """Which run the layers' figures are of; nothing if there is no choice."""
    if len(names) < 2:
        return ""
    options = (f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
    select = f'<select id="variant" autocomplete="off">{"".join(options)}</select>'
    return f'<p class="controls"><label for="variant">Run</label>{select}</p>'


def key(looks: Iterable[tuple[int, str]]) -> str:
    """A legend to read only: the index of a look, and words."""
    items = (f"<li>{line_swatch(look)}<span>{escape(words)}</span></li>" for look, words in looks)
    return f'<ul class="key">{"".join(items)}</ul>'
