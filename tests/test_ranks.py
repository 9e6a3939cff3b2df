"""Collectives deliver what was sent, and count its bytes."""

import os
import signal
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from kfc.distributed import packing, ranks
from kfc.distributed.ranks import Ranks, join_ranks
from ranks import RankError, run_ranks, start_ranks

# Packing

matrix_sizes = st.integers(1, 9)


@given(shape=st.lists(st.integers(1, 5), max_size=4), size=matrix_sizes, groups=st.integers(1, 3))
def test_packed_tensors_have_the_predicted_size(shape, size, groups):
    for shape_sent, symmetric in ((shape, False), ([groups, size, size], True)):
        sent = torch.rand(shape_sent)
        if symmetric:
            sent = sent + sent.mT
        packed = packing.Packing(tuple(shape_sent), symmetric)
        numbers = packed.pack(sent)
        assert numbers.shape == (packed.numbers,)
        assert_close(packed.unpack(numbers), sent, rtol=0, atol=0)


@given(size=matrix_sizes, groups=st.integers(1, 3))
def test_half_of_a_symmetric_matrix_is_sent(size, groups):
    expected = groups * size * (size + 1) // 2
    own = packing.Packing((groups, size, size), symmetric=True)
    square = torch.randn(groups, size, size)
    symmetric = square + square.mT
    assert own.numbers == own.pack(symmetric).numel() == expected
    assert torch.equal(own.unpack(own.pack(symmetric)), symmetric)
    # Only the lower triangle is read.
    assert torch.equal(own.pack(symmetric.tril()), own.pack(symmetric))


# A single process


def test_one_process_returns_its_argument_and_sends_nothing():
    alone = Ranks(None)
    tensors = [torch.ones(2, 3), torch.zeros(1)]
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.sum([1.0, 2.0]) == alone.mean([1.0, 2.0]) == alone.largest([1.0, 2.0]) == [1, 2]
    assert alone.any(True)
    assert not alone.any(False)
    assert alone.gather([1.0, 2.0]) == [[1.0, 2.0]]
    for messages in (alone.start_sum(tensors, "x"), alone.start_broadcast(tensors, 0, "x")):
        arrived = messages.wait()
        assert [id(tensor) for tensor in arrived] == [id(tensor) for tensor in tensors]
    thing = object()
    assert alone.share(thing) is thing
    assert not alone.traffic


def test_without_a_group_there_is_one_rank():
    model = torch.nn.Linear(1, 1)
    for choice in ("auto", None):
        module, found = join_ranks(model, choice)
        assert module is model
        assert found.size == 1


# Several processes


def call_every_method(rank):
    """Return the result of each method, with different arguments on each rank, and the traffic."""
    group = Ranks(dist.group.WORLD)
    results = {
        "sum": group.sum([rank, 1.5], "sum"),
        "mean": group.mean([float(rank), 3.0], "mean"),
        "largest": group.largest([float(-rank), float(rank)], "largest"),
        "any": [group.any(rank == 1, "any"), group.any(False, "any")],
        "gather": group.gather([rank, 10.0 * rank], "gather"),
        "share": group.share({"names": ["a", rank], "tensor": torch.full((2,), rank)}, "share"),
    }
    tensors = tensors_of(rank)
    for limit in (ranks.BUCKET_BYTES, 64):
        with patch.object(ranks, "BUCKET_BYTES", limit):
            started = group.start_sum(tensors, "start_sum")
            results["summed", limit] = started.wait()
            results["buckets", limit] = len(started.buckets)
            sent = group.start_broadcast(tensors, 1, "start_broadcast")
            results["sent", limit] = sent.wait()
    results["untouched"] = all(map(torch.equal, tensors, tensors_of(rank)))
    results["wrappers"] = find_group(rank)
    return results, group.traffic


def tensors_of(rank):
    """Return tensors of several dtypes and shapes, one empty, one not contiguous."""
    return [
        torch.arange(6.0).reshape(2, 3) + rank,
        torch.full((3,), 2.0**-40 + rank, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.arange(24.0).reshape(4, 6)[:, ::2] * (rank + 1),
        torch.tensor(7 + rank, dtype=torch.int32),
        torch.full((5,), 1.0 + rank),
    ]


def find_group(rank):
    """Join the group of the DDP wrapper, the default group, none, and a given one."""
    model = torch.nn.Linear(1, 1)
    inside, of_wrapper = join_ranks(DistributedDataParallel(model), "auto")
    assert inside is model
    of_rank = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    with pytest.raises(ValueError, match=r"model\.module"):
        join_ranks(DistributedDataParallel(model), None)
    choices = [of_wrapper, *(join_ranks(model, choice)[1] for choice in ("auto", None, of_rank))]
    return [(ranks.rank, ranks.size) for ranks in choices]


@pytest.fixture(scope="module")
def results_of_ranks():
    return run_ranks(call_every_method, 3)


def test_numbers_are_reduced_over_ranks(results_of_ranks):
    for rank, (results, _) in enumerate(results_of_ranks):
        assert results["sum"] == [3.0, 4.5]
        assert results["mean"] == [1.0, 3.0]
        assert results["largest"] == [0.0, 2.0]
        assert results["any"] == [True, False]
        assert results["gather"] == [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]]
        assert results["share"]["names"] == ["a", 0]
        assert_close(results["share"]["tensor"], torch.tensor([0, 0]))
        assert results["wrappers"] == [(rank, 3), (rank, 3), (0, 1), (0, 1)]


@pytest.mark.parametrize(("limit", "buckets"), [(ranks.BUCKET_BYTES, 3), (64, 5)])
def test_tensors_are_summed_and_sent_in_buckets(results_of_ranks, limit, buckets):
    total = [sum(same) for same in zip(*map(tensors_of, range(3)), strict=True)]
    for results, _ in results_of_ranks:
        assert results["buckets", limit] == buckets
        for found, expected in (("summed", total), ("sent", tensors_of(1))):
            for tensor, truth in zip(results[found, limit], expected, strict=True):
                assert_close(tensor, truth, rtol=0, atol=0)
        assert results["untouched"]


def test_bytes_are_counted_by_subject(results_of_ranks):
    of_tensors = sum(tensor.nbytes for tensor in tensors_of(0))
    for _, traffic in results_of_ranks:
        shared = traffic.pop("share")
        assert 100 < shared < 10_000
        assert traffic == {
            "sum": 16,
            "mean": 16,
            "largest": 16,
            "any": 16,
            "gather": 48,
            "start_sum": 2 * of_tensors,
            "start_broadcast": 2 * of_tensors,
        }


# The processes that tests start


def one_fails(rank):
    if rank == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def each_ends_in_its_own_way(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        raise ValueError("no")
    return torch.get_default_dtype()


def never_end(rank):
    time.sleep(60)


def test_the_error_of_a_rank_is_raised():
    with pytest.raises(
        RankError, match=r"(?s)rank 1 ended with code 1.*does not like this.*rank 0"
    ):
        run_ranks(one_fails, 2)


def test_ranks_that_do_not_end_are_killed():
    with pytest.raises(RankError, match=r"rank 0 did not end within 0\.\d s"):
        run_ranks(never_end, 1, timeout=0.5)


def test_the_outcome_of_each_rank_is_known():
    with start_ranks(each_ends_in_its_own_way, 4, dtype=torch.float64) as ranks:
        killed, stopped, failed, returned = ranks.outcomes(60, of=[0, 2, 3])
    assert (killed.code, stopped.code, failed.code, returned.code) == (-9, None, 1, 0)
    assert "ValueError: no" in failed.error
    assert "ValueError: no" in failed.stderr
    assert returned.result == torch.float64
    assert not any(process.is_alive() for process in ranks.processes)
