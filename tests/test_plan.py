"""`kfc plan`: predictions from the shapes of layers, and the page that shows them."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import kfc
from browsing import WIDTHS, figure_ids, opened, page_width, running_browser, undrawn
from kfc.distributed.options import PLACEMENTS
from kfc.lab.cli import app
from kfc.lab.planning.machine import Machine, measure_machine, seconds_of
from kfc.lab.planning.prediction import Task, predict, predict_all
from kfc.lab.report.plan import (
    Checked,
    Plan,
    plan_rows,
    plan_verdict,
    summary_rows,
    write_plan_page,
)
from ranks import run_ranks

MACHINE = Machine(
    products=1e9, decompositions=5e8, memory=1e10, network=1e9, latency=1e-4, start=1e-6
)
PERIODS = kfc.Periods(5, 10)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 16, 600), nn.ReLU(), nn.Linear(600, 10))


def task(passes=0.5):
    alone = kfc.Parallel(group=None)
    optimizer = kfc.KFC(network(), schedule=PERIODS, parallel=alone, seed=0)
    return Task.of(optimizer.engine, torch.randn(128, 3, 8, 8), passes)


def expected_traffic(rank, placement):
    run = DistributedDataParallel(network())
    parallel = kfc.Parallel(placement=placement)
    optimizer = kfc.KFC(run, schedule=PERIODS, parallel=parallel, seed=0)
    found = optimizer.diagnostics["ranks"]
    F.cross_entropy(run(torch.randn(32, 3, 8, 8)), torch.randint(10, (32,))).backward()
    optimizer.step()
    sent = optimizer.diagnostics["ranks"]["sent"]["statistics"]
    optimizer.close()
    assert dist.get_world_size() == 3
    return found["expected"], sent


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_traffic_is_what_ranks_expect_and_send(placement):
    (expected, sent), *_ = run_ranks(expected_traffic, 3, placement)
    found = predict(task(), MACHINE, 3, placement).traffic
    assert found["statistics"] == pytest.approx(expected["statistics"] / 5)
    assert found["statistics"] == pytest.approx(sent / 5)
    assert found["inverses"] == pytest.approx(expected["inverses"] / 10)
    assert found["natural gradients"] == expected["natural gradients"]
    assert found["gradients"] == sum(p.nbytes for p in network().parameters())


def test_one_rank_has_the_memory_of_the_description_and_sends_nothing():
    optimizer = kfc.KFC(network(), parallel=kfc.Parallel(group=None))
    total = re.search(r"total curvature memory: ([\d.]+) MiB", optimizer.describe())
    found = predict(task(), MACHINE, 1, "auto")
    assert found.memory / 2**20 == pytest.approx(float(total[1]), abs=0.05)
    assert not any(found.traffic.values())
    assert not any(value for name, value in found.seconds.items() if name.startswith("sending"))


def test_work_is_divided_between_ranks_and_messages_take_longer_with_more_of_them():
    found = {n: predict(task(), MACHINE, n, "shared") for n in (1, 2, 4, 1024)}
    assert found[2].seconds["inverses"] < found[1].seconds["inverses"]
    assert found[4].seconds["inverses"] <= found[2].seconds["inverses"]
    assert found[4].seconds["statistics"] == found[1].seconds["statistics"]
    assert found[1024].seconds["sending gradients"] > found[4].seconds["sending gradients"]
    assert found[1024].limit == "sending gradients"
    kept = predict(task(), MACHINE, 4, "gradients")
    assert kept.memory < found[4].memory
    assert kept.seconds["natural gradients"] < found[4].seconds["natural gradients"]


def test_a_sum_over_ranks_is_a_ring_of_messages():
    parameters = sum(p.nbytes for p in network().parameters())
    seconds = predict(task(), MACHINE, 4, "replicated").seconds["sending gradients"]
    assert seconds == pytest.approx(2 * 3 / 4 * parameters / 1e9 + 6 * 1e-4)


def test_processes_that_share_cores_take_turns():
    alone, crowded = (predict(task(), MACHINE, 4, "auto", share) for share in (1.0, 2.0))
    assert crowded.step == pytest.approx(2 * alone.step)


def test_the_machine_is_measured():
    found = measure_machine(network=1e9, latency=1e-5)
    assert found.network == 1e9
    assert found.latency == 1e-5
    size, times = 256, []
    matrix = torch.randn(size, size)
    times.append(seconds_of(lambda: matrix @ matrix))
    assert found.products > 0.05 * size**3 / times[0]
    assert min(found.decompositions, found.memory) > 0


# The command and the page


def test_the_command_prints_a_table_and_writes_a_page(tmp_path):
    page = tmp_path / "plan.html"
    options = ["--image", "1x8x8", "--batch-size", "32", "--network", "10", "--latency", "20"]
    result = CliRunner().invoke(
        app, ["plan", "digits", *options, "--ranks", "1,2,1024", "-o", str(page)]
    )
    assert result.exit_code == 0, result.output
    assert "1024" in result.output
    assert "limit" in result.output
    assert "10.00 GB/s" in page.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "3x32"], "must be three numbers such as 3x32x32"),
        (["--image", "0x8x8"], "must be positive"),
        (["--ranks", "0,1"], "whole numbers from 1 to 1024"),
        (["--ranks", "two"], "whole numbers from 1 to 1024"),
        (["--check", "2000"], "whole numbers from 1 to 1024"),
        (["--network", "-1"], "must be positive"),
        (["--image", "3x9x9"], "takes images of 8x8 pixels"),
    ],
)
def test_bad_options_are_errors(options, message, tmp_path):
    result = CliRunner().invoke(app, ["plan", "digits", *options, "-o", str(tmp_path / "p.html")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_network_that_does_not_fit_the_image_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = "nn.Sequential(nn.Flatten(), nn.Linear(12, 3))"
    source = f"from torch import nn\ndef net():\n    return {network}\n"
    (tmp_path / "own_network.py").write_text(source)
    result = CliRunner().invoke(app, ["plan", "own_network:net", "--image", "1x3x3"])
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    assert "own_network:net failed on images of 1x3x3" in text
    assert "--image" in text


def made_up_plan(ranks=(1, 2, 64, 1024)):
    predictions = predict_all(task(), MACHINE, ranks)
    checked = [Checked(predict(task(), MACHINE, 2, "auto"), 0.6)]
    return Plan("a network", 128, MACHINE, predictions, checked)


def test_tables_have_a_row_for_every_prediction():
    plan = made_up_plan()
    assert len(plan_rows(plan)) == 1 + 1 + 3 * len(PLACEMENTS)
    rows = summary_rows(plan)
    assert [row[0] for row in rows] == ["ranks", "1", "2", "64", "1024"]
    assert len({len(row) for row in rows}) == 1
    alone = summary_rows(made_up_plan(ranks=(1,)))
    assert [len(row) for row in alone] == [6, 6]


def test_the_verdict_is_about_the_most_ranks():
    plan = made_up_plan()
    largest = min((p for p in plan.predictions if p.ranks == 1024), key=lambda each: each.step)
    row = next(row for row in plan_rows(plan) if row[:2] == ("1024", largest.placement))
    start = f"On 1,024 ranks, a step of KFC is predicted to take {row[2]} ms, {row[4]} times"
    assert plan_verdict(plan).startswith(start)
    assert plan_verdict(made_up_plan(ranks=(1,))).startswith("On 1 rank, ")


@pytest.fixture(scope="module")
def tab():
    with running_browser() as tab:
        yield tab


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_drawn_and_nothing_overflows(tab, tmp_path, width):
    write_plan_page(tmp_path / "page.html", made_up_plan())
    with opened(tab, tmp_path / "page.html", width) as page:
        assert figure_ids(page) == {"step", "memory", "sent"}
        assert undrawn(page) == []
        assert page_width(page) <= width
