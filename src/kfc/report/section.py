"""A section of a page: a heading, markup, and figures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kfc.report.figures import Figure


@dataclass(frozen=True)
class Group:
    """Figures that belong together, in rows of as many as stand beside each other.

    Attributes:
        title: none for the only one of a section.
        after: markup below the figures.
    """

    figures: Sequence[Figure]
    title: str = ""
    columns: int = 2
    after: str = ""

    def html(self) -> str:
        heading = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        level = "h4" if self.title else "h3"
        drawings = "".join(_figure(figure, level) for figure in self.figures)
        alone = len(self.figures) == 1 and not self.title
        kind = "single" if alone else f"grid columns-{self.columns}"
        middle = f'<div class="{kind}">{drawings}</div>' if drawings else ""
        return f"{heading}{middle}{self.after}"


@dataclass(frozen=True)
class Section:
    """
    Attributes:
        before, after: markup around the figures.
        groups: more figures, under headings of their own.
    """

    id: str
    title: str
    before: str = ""
    figures: Sequence[Figure] = ()
    after: str = ""
    groups: Sequence[Group] = ()

    def all_figures(self) -> list[Figure]:
        return [*self.figures, *(figure for group in self.groups for figure in group.figures)]

    def html(self) -> str:
        middle = "".join(group.html() for group in (Group(self.figures), *self.groups))
        return (
            f'<section id="{self.id}"><h2>{escape(self.title)}</h2>'
            f"{self.before}{middle}{self.after}</section>"
        )


def _figure(figure: Figure, level: str) -> str:
    title = escape(figure.title)
    # A figure without a height of its own is as high as it is wide.
    height = figure.layout.get("height")
    shape = f'class="plot" style="min-height:{height}px"' if height else 'class="plot square"'
    return (
        f"<figure><{level}>{title}</{level}>"
        f'<div {shape} id="{figure.id}" role="img" aria-label="{title}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )
