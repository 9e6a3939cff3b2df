"""The line in the log after the first step."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from ranks import run_ranks


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3))


def train(network, optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        x, y = torch.randn(12, 6), torch.randint(3, (12,))
        if isinstance(optimizer, kfc.KFAC):
            optimizer.step(lambda x=x, y=y: F.cross_entropy(network(x), y))
            continue
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [kfc.KFC, kfc.KFAC, kfc.WhitenedAdam, kfc.Preconditioner])
def test_the_first_step_logs_how_the_model_is_treated(kind, caplog):
    network = model()
    optimizer = kind(network)
    with caplog.at_level(logging.INFO, logger="kfc"):
        train(network, optimizer)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert line.startswith("98.8% of 84 trained weights have curvature; memory: factors ")
    assert "inverses " in line
    assert ("cost, in forward and backward passes" in line) == (kind is not kfc.WhitenedAdam)
    assert "loss: Categorical" in line
    assert "mean" in line
    total = optimizer.describe().split("total curvature memory: ")[1].splitlines()[0]
    numbers = [part.split(" ", 1)[1] for part in line.split(": ")[1].split(";")[0].split(", ")]
    assert in_bytes(total) == pytest.approx(sum(map(in_bytes, numbers)), rel=0.1)


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 1024}[unit]


def log_of_a_rank(rank: int) -> int:
    torch.manual_seed(0)
    network, lines = model(), []
    handler = logging.Handler()
    handler.emit = lines.append
    logger = logging.getLogger("kfc")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    train(network, kfc.Preconditioner(network), 1)
    return sum(record.levelno == logging.INFO for record in lines)


def test_only_rank_0_logs():
    assert run_ranks(log_of_a_rank, 2) == [1, 0]
