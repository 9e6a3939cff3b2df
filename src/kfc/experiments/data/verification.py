"""Whether decoded content is the data set it is said to be."""

from __future__ import annotations

from kfc.experiments.data.catalogue import owner_of
from kfc.experiments.data.forms import Entry
from kfc.experiments.data.sets import DataError, Decoded, Split, content_digest


class AnotherSetError(DataError):
    """The content of another data set of the catalogue."""


def verified_digest(entry: Entry, decoded: Decoded) -> str:
    """The digest of content that has the catalogue's shapes, counts and, if known, digest."""
    for title, split, count in (
        ("training", decoded.train, entry.train),
        ("test", decoded.test, entry.test),
    ):
        require_structure(entry, title, split, count)
    digest = content_digest(decoded)
    if entry.digest not in (None, digest):
        wrong = f"the content has sha256 {digest}, not {entry.digest}"
        if owner := owner_of(digest):
            raise AnotherSetError(f"{wrong}; this is the content of {owner}")
        raise DataError(wrong)
    return digest


def require_structure(entry: Entry, title: str, split: Split, count: int) -> None:
    if split.images.shape[1:] != entry.shape:
        raise DataError(f"the {title} images are {split.images.shape[1:]}, not {entry.shape}")
    if len(split.images) != len(split.labels):
        raise DataError(f"{len(split.images):,} {title} images, {len(split.labels):,} labels")
    counts_fit = len(split) == count if entry.digest else 0 < len(split) <= count
    if not counts_fit:
        raise DataError(f"{len(split):,} {title} examples, not {count:,}")
    if split.labels.min() < 0 or split.labels.max() >= entry.classes:
        raise DataError(f"there are {title} labels outside 0 to {entry.classes - 1}")
