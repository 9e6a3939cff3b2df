"""A rank that is killed or stopped, fails, or has fewer batches ends the others with an error.

The error names the collective, the step and, where torch.distributed knows it, the rank.
"""

import os
import re
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc._helpers import group_timeout
from kfc.distributed.ranks import CollectiveError, Ranks, leave_group
from ranks import run_ranks, start_ranks

FAULTY_STEP = 12
# Seconds: until collectives give up, and until all ranks must have ended.
GROUP_SECONDS, LIMIT_SECONDS = 4.0, 30.0

# Functions that ranks run


def train(rank, faulty_rank, fault):
    """Train on the same batches; at one step, one rank does something else.

    Without DistributedDataParallel: all collectives are those of kfc.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kfc.KFC(model, lr=0.01)
    for step in range(1, 2 * FAULTY_STEP):
        if rank == faulty_rank and step == FAULTY_STEP:
            return fault()
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
    return "all steps"


def start_late(rank, faulty_rank, fault):
    if rank == faulty_rank:
        fault()
    kfc.KFC(nn.Linear(3, 2))


def send_signal(number):
    os.kill(os.getpid(), number)


def fail():
    raise ValueError("out of memory")


def have_no_batches():
    return "fewer steps"


def sleep():
    time.sleep(60)


KILL, STOP = partial(send_signal, signal.SIGKILL), partial(send_signal, signal.SIGSTOP)


def errors(function, cases, group_timeout=GROUP_SECONDS):
    """The message of each rank that is not at fault, by case; all cases run at once."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                start_ranks(function, size, *what, store=store, group_timeout=group_timeout)
            )
            for name, (store, size, *what) in cases.items()
        }
        return {
            name: [error_message(outcome) for outcome in others(started[name], *case)]
            for name, case in cases.items()
        }


def others(ranks, _, size, faulty_rank, __):
    waiting = [rank for rank in range(size) if rank != faulty_rank]
    outcomes = ranks.outcomes(LIMIT_SECONDS, of=waiting)
    return [outcomes[rank] for rank in waiting]


def error_message(outcome):
    assert outcome.code == 1, str(outcome)
    found = re.findall(rf"CollectiveError: (rank {outcome.rank} of .*)", outcome.stderr)
    assert len(found) == 1, outcome.stderr
    return found[0]


def assert_all_match(messages, pattern):
    for message in messages:
        assert re.fullmatch(pattern, message), message


FAILED = rf"rank \d of \d: all_reduce of \w+ failed at step {FAULTY_STEP}: "
HINT = r" The output of the other ranks .* have the same number of batches\."


# A fault in the middle of training


def test_ranks_end_at_once_if_another_has_ended():
    """Long before the timeout of the process group."""
    found = errors(
        train,
        {
            "killed": ("launcher", 2, 1, KILL),
            "killed, of three": ("rank 0", 3, 1, KILL),
            "failed": ("launcher", 3, 1, fail),
            "fewer batches": ("rank 0", 2, 1, have_no_batches),
            "holder of the store killed": ("rank 0", 2, 0, KILL),
        },
        group_timeout=10 * LIMIT_SECONDS,
    )
    for messages in found.values():
        assert_all_match(messages, rf"{FAILED}.*(closed|reset) by peer.*{HINT}")


def test_ranks_do_not_wait_longer_than_the_timeout():
    found = errors(
        train,
        {
            "stopped": ("launcher", 2, 1, STOP),
            "stopped, of three": ("rank 0", 3, 1, STOP),
            "asleep": ("rank 0", 3, 1, sleep),
            "fewer batches, then another collective": ("launcher", 2, 1, dist.barrier),
            "holder of the store stopped": ("rank 0", 2, 0, STOP),
        },
    )
    late = "Timed out waiting 4000ms|timeout caused pair closure|(closed|reset) by peer"
    for messages in found.values():
        assert_all_match(messages, rf"{FAILED}.*({late}).*{HINT}")


# A fault at the start


def test_a_rank_that_does_not_start_is_named():
    found = errors(
        start_late,
        {
            "stopped": ("launcher", 2, 1, STOP),
            "killed": ("launcher", 2, 1, KILL),
            "asleep, of three": ("rank 0", 3, 1, sleep),
        },
    )
    for first, *more in found.values():
        barrier = r"of \d: monitored_barrier failed before the first step:"
        missing = r"Ranks 1 failed to pass monitoredBarrier in 4000 ms\."
        assert re.match(rf"rank 0 {barrier} \[Rank 0\]: {missing}", first)
        assert_all_match(more, rf"rank 2 {barrier} .* check rank 0 logs for faulty rank.*")


# Without a fault


def end_before_others(rank):
    Ranks(dist.group.WORLD).sum([1.0])
    if rank != 0:
        time.sleep(1.0)


def test_nothing_is_printed_if_the_holder_of_the_store_ends_first():
    with start_ranks(end_before_others, 2, store="rank 0") as ranks:
        outcomes = ranks.outcomes(LIMIT_SECONDS)
    assert [(outcome.code, outcome.stderr) for outcome in outcomes] == [(0, "")] * 2


def join_through_file(rank, path):
    """Use a store that has no server."""
    dist.barrier()  # until all ranks have joined the first group
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return Ranks(dist.group.WORLD).sum([1.0])


def test_any_store_will_do(tmp_path):
    assert run_ranks(join_through_file, 2, str(tmp_path / "store")) == [[2.0], [2.0]]


# Messages


def test_the_first_line_of_the_backend_is_quoted():
    ranks = Ranks(None)
    ranks.at(7)
    cause = RuntimeError("NCCL watchdog timeout.\nC++ stack trace")
    with pytest.raises(CollectiveError) as raised, ranks.naming_errors("all_reduce of norms"):
        raise cause
    message = str(raised.value)
    start = "rank 0 of 1: all_reduce of norms failed at step 7: NCCL watchdog timeout. The output"
    assert message.startswith(start)
    assert "stack" not in message
    assert raised.value.__cause__ is cause


# Private parts of torch


def own_timeout(rank):
    return group_timeout(dist.group.WORLD)


def test_the_timeout_of_a_group_is_found():
    assert run_ranks(own_timeout, 1, group_timeout=17) == [timedelta(seconds=17)]


# The end


def threads_after_leaving(rank):
    """Train with DistributedDataParallel, leave the group, and return the names of threads."""

    def train():
        model = nn.Linear(3, 2)
        run = DistributedDataParallel(model)
        optimizer = kfc.KFC(run, lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(run(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
            optimizer.step()

    train()
    leave_group()
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs the threads of Linux")
def test_no_thread_of_the_group_is_left_when_the_interpreter_ends():
    """One that released a Python object then would abort the process."""
    for names in run_ranks(threads_after_leaving, 2):
        assert not [name for name in names if "gloo" in name]
