"""Inputs and batches, compared with direct computations in numpy."""

import multiprocessing

import numpy as np
import pytest
import torch

from data_files import random_set
from kfc.lab.data import Batches, DataError, Inputs, Split

TRUTH = random_set((3, 32, 32)).train


def numbered(count):
    """Return images whose pixels and label are the index of the image."""
    numbers = np.arange(count, dtype=np.int64)
    images = np.zeros((count, 1, 2, 2), np.uint8)
    images[:] = (numbers % 256).astype(np.uint8)[:, None, None, None]
    return Split(images, numbers)


RAW = Inputs(np.zeros((1, 2, 2), np.float32))


def mapped(split, folder):
    np.save(folder / "images.npy", split.images)
    np.save(folder / "labels.npy", split.labels)
    arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return Split(*arrays)


def numbers_in(batches):
    return [labels.tolist() for _, labels in batches]


def test_centred_inputs():
    pixels = TRUTH.images.astype(np.float64)
    inputs = Inputs.centred(TRUTH)(TRUTH.images[:7])
    assert inputs.dtype == torch.float32
    np.testing.assert_allclose(inputs, (pixels - pixels.mean(0))[:7], atol=1e-4)


def test_normalised_inputs():
    pixels = TRUTH.images.astype(np.float64)
    centred = pixels - pixels.mean(0)
    inputs = Inputs.normalised(TRUTH)
    assert inputs.divisor == pytest.approx(centred.std(), rel=1e-12)
    np.testing.assert_allclose(inputs(TRUTH.images), centred / centred.std(), atol=1e-5)


def test_statistics_of_several_chunks_of_images():
    images = np.random.default_rng(0).integers(0, 256, (9001, 1, 3, 3), dtype=np.uint8)
    inputs = Inputs.normalised(Split(images, np.zeros(9001, np.int64)))
    centred = images - images.mean(0, dtype=np.float64)
    assert inputs.divisor == pytest.approx(centred.std(), rel=1e-12)
    np.testing.assert_array_equal(inputs.mean, images.mean(0, dtype=np.float64).astype(np.float32))


def test_equal_images_cannot_be_normalised():
    with pytest.raises(DataError, match="equal"):
        Inputs.normalised(Split(np.full((5, 1, 2, 2), 9, np.uint8), np.zeros(5, np.int64)))


def test_an_epoch_has_every_example_once_with_its_label():
    batches = Batches(numbered(100), RAW, 10, seed=3)
    assert len(batches) == 10
    seen = []
    for images, labels in batches.epoch(0):
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert images.shape == (10, 1, 2, 2)
        assert torch.equal(images[:, 0, 0, 0].long(), labels)
        seen += labels.tolist()
    assert sorted(seen) == list(range(100))


def test_the_incomplete_last_batch_is_dropped():
    batches = Batches(numbered(100), RAW, 30, seed=3)
    assert len(batches) == 3
    assert [len(labels) for _, labels in batches.epoch(5)] == [30, 30, 30]


def test_only_the_first_examples_are_used():
    batches = Batches(numbered(100), RAW, 7, seed=3, examples=21)
    seen = [number for batch in numbers_in(batches.epoch(0)) for number in batch]
    assert sorted(seen) == list(range(21))


def test_the_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        return numbers_in(Batches(numbered(64), RAW, 8, seed).epoch(epoch))

    assert order(1, 2) == order(1, 2)
    orders = [order(seed, epoch) for seed in (-1, 0, 1, 2) for epoch in (0, 1, 2)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_epoch(workers, tmp_path):
    batches = Batches(mapped(numbered(64), tmp_path), RAW, 8, seed=1, workers=workers)
    everything = numbers_in(Batches(numbered(64), RAW, 8, seed=1).epoch(4))
    assert numbers_in(batches.epoch(4, start=3)) == everything[3:]
    assert numbers_in(batches.epoch(4, start=8)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_batches(workers, tmp_path):
    split, inputs = mapped(TRUTH, tmp_path), Inputs.normalised(TRUTH)
    alone = list(Batches(TRUTH, inputs, 3, seed=9).epoch(1))
    shared = list(Batches(split, inputs, 3, seed=9, workers=workers).epoch(1))
    assert len(alone) == len(shared) == 6
    for (images, labels), (shared_images, shared_labels) in zip(alone, shared, strict=True):
        assert torch.equal(images, shared_images)
        assert torch.equal(labels, shared_labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_state_does_not_change(workers):
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(Batches(numbered(20), RAW, 5, seed=1, workers=workers).epoch(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_leaving_the_loop_ends_the_workers():
    batches = Batches(numbered(200), RAW, 2, seed=1, workers=2)
    for _ in batches.epoch(0):
        assert len(multiprocessing.active_children()) == 2
        break
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("size", "ranks"), [(8, 2), (9, 2), (7, 3), (3, 3)])
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_share_the_same_batches(size, ranks, workers):
    """The parts are in order, and the weighted mean over ranks is the mean of the batch."""
    whole = numbers_in(Batches(numbered(40), RAW, size, seed=2).epoch(1, start=1))
    parts = [
        Batches(numbered(40), RAW, size, seed=2, workers=workers, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    dealt = [numbers_in(part.epoch(1, start=1)) for part in parts]
    for batch, *shares in zip(whole, *dealt, strict=True):
        assert [number for share in shares for number in share] == batch
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        means = [part.weight * np.mean(share) for part, share in zip(parts, shares, strict=True)]
        assert np.mean(means) == pytest.approx(np.mean(batch))


def test_every_rank_needs_an_example_of_every_batch():
    with pytest.raises(
        ValueError, match=r"batch_size must be at least the number of ranks \(3\), got 2"
    ):
        Batches(numbered(10), RAW, 2, seed=0, rank=1, ranks=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 11},
        {"batch_size": 2.0},
        {"examples": 11},
        {"examples": 0},
        {"examples": 3, "batch_size": 4},
        {"workers": -1},
        {"seed": "1"},
    ],
)
def test_wrong_arguments_are_named(wrong):
    arguments = {"batch_size": 2, "seed": 0, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Batches(numbered(10), RAW, **arguments)


@pytest.mark.parametrize(("number", "start"), [(-1, 0), (0, -1), (0, 6), (0.5, 0)])
def test_wrong_epochs_are_errors_before_iteration(number, start):
    with pytest.raises(ValueError, match="must be"):
        Batches(numbered(10), RAW, 2, seed=0).epoch(number, start)
