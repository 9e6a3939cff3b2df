"""Read the data that a written page embeds."""

import json
import re
from html import unescape
from types import SimpleNamespace

DATA = r'<script type="application/json"(?: id="([\w-]+)")?>(.*?)</script>'


def figures_in(page):
    """Return the figures of a page, given its text, with their ids, titles and plotly data."""
    places = re.findall(
        r'id="([\w-]+)" role="img" aria-label="([^"]*)"></div>\s*' + DATA, page, re.DOTALL
    )
    return [
        SimpleNamespace(id=id, title=unescape(title), **json.loads(data))
        for id, title, _, data in places
    ]


def curve_data_in(page):
    """Return the data from which the script of a page draws training curves."""
    data = dict(re.findall(DATA, page, re.DOTALL))
    return json.loads(data["curve-data"])
