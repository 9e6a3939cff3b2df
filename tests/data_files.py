"""Small data sets in every official format, written independently of the code that reads them."""

import gzip
import io
import json
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from kfc.lab.data.catalogue import CATALOGUE, Entry
from kfc.lab.data.datasets import Split, Splits, content_digest

BATCH = 4


def random_set(shape: tuple[int, int, int], seed: int = 0) -> Splits:
    """Return 20 training and 4 test examples: five batches and one, as in CIFAR-10."""
    random = np.random.default_rng(seed)

    def split(count: int) -> Split:
        images = random.integers(0, 256, (count, *shape), dtype=np.uint8)
        return Split(images, random.integers(0, 10, count))

    return Splits(split(5 * BATCH), split(BATCH))


def small_entry(name: str, truth: Splits, **changes: object) -> Entry:
    """Return the catalogue's entry with the counts and digest (if it has one) of a small set."""
    entry = CATALOGUE[name]
    digest = content_digest(truth) if entry.digest else None
    sizes = {"train": len(truth.train), "extra": 0, "test": len(truth.test)}
    return replace(entry, digest=digest, **sizes, **changes)


def cifar_batches(truth: Splits) -> dict[str, Split]:
    named = {}
    for i in range(5):
        part = slice(i * BATCH, (i + 1) * BATCH)
        named[f"data_batch_{i + 1}"] = Split(truth.train.images[part], truth.train.labels[part])
    return {**named, "test_batch": truth.test}


def binary_files(truth: Splits) -> dict[str, bytes]:
    return {
        f"{name}.bin": b"".join(
            bytes([label]) + image.tobytes()
            for image, label in zip(batch.images, batch.labels, strict=True)
        )
        for name, batch in cifar_batches(truth).items()
    }


def pickle_files(truth: Splits) -> dict[str, bytes]:
    return {
        name: pickle.dumps(
            {
                b"batch_label": name.encode(),
                b"labels": batch.labels.tolist(),
                b"data": batch.images.reshape(len(batch), -1),
            },
            protocol=2,
        )
        for name, batch in cifar_batches(truth).items()
    }


def sheet_files(truth: Splits) -> dict[str, bytes]:
    files = {
        "train_lables.json": json.dumps(truth.train.labels.tolist()).encode(),
        "test_lables.json": json.dumps(truth.test.labels.tolist()).encode(),
    }
    for name, batch in cifar_batches(truth).items():
        sheet = io.BytesIO()
        Image.fromarray(batch.images.transpose(0, 2, 3, 1).reshape(-1, 1024, 3)).save(sheet, "PNG")
        files[f"{name}.png"] = sheet.getvalue()
    return files


def idx_files(truth: Splits) -> dict[str, bytes]:
    files = {}
    for prefix, split in (("train", truth.train), ("t10k", truth.test)):
        count, _, height, width = split.images.shape
        header = struct.pack(">4I", 0x803, count, height, width)
        files[f"{prefix}-images-idx3-ubyte"] = header + split.images.tobytes()
        labels = split.labels.astype(np.uint8).tobytes()
        files[f"{prefix}-labels-idx1-ubyte"] = struct.pack(">2I", 0x801, count) + labels
    return files


def mat_files(
    truth: Splits, *, compressed: bool = True, extra: Split | None = None
) -> dict[str, bytes]:
    files = {}
    splits = {"train": truth.train, "test": truth.test, **({"extra": extra} if extra else {})}
    for prefix, split in splits.items():
        file = io.BytesIO()
        labels = np.where(split.labels == 0, 10, split.labels)[:, None].astype(np.uint8)
        variables = {"X": split.images.transpose(2, 3, 1, 0), "y": labels}
        savemat(file, variables, do_compression=compressed)
        files[f"{prefix}_32x32.mat"] = file.getvalue()
    return files


def zipped(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content) for name, content in files.items()}


def tar(files: dict[str, bytes], root: str) -> bytes:
    """Return a .tar.gz archive with the files in the folder ``root``."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as writer:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{root}/{name}" if root else name)
            member.size = len(content)
            writer.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
