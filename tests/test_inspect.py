"""`kfc inspect`: tables, JSON compared with the analysis itself, pages, invalid arguments."""

import json
import math
import re
import signal
import time
from dataclasses import replace
from importlib import import_module
from statistics import median

import plotly.graph_objects as go
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc.analysis as analysis
from commands import assert_clear_error, kfc, kfc_here, start_kfc
from inspected_networks import (
    ConstantRows,
    SequenceFirst,
    inspect_small,
    network_of,
    small_network,
)
from kfc.analysis.krylov import UnsolvableError
from kfc.lab.config import ConfigError
from kfc.lab.data import Inputs, load
from kfc.lab.inspection.results import Inspection, InspectionSettings, thinned_ranks
from kfc.lab.inspection.runner import inspect_network
from kfc.lab.networks import build
from kfc.lab.report.heatmaps import MOST_MAPS, cross_map_figure, offset_figure, shown_maps
from kfc.lab.report.inspection import (
    ASSUMPTIONS,
    notes_of,
    quality_rows,
    verdict_rows,
    write_inspection_page,
)
from written_pages import figures_in

KINDS = ("derivatives", "activations")
FEW = ("--examples", "8", "--batches", "3", "--reach", "2", "--threads", "1")
NETWORKS = """
from collections import OrderedDict
from torch import nn

def pooled(pool):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(64, 10)
    )

def highest():
    return pooled(nn.MaxPool2d(2))

def average():
    return pooled(nn.AvgPool2d(2))

def normalised():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(),
        nn.Linear(144, 10),
    )

def wordy():
    return nn.Sequential(OrderedDict({"flat": nn.Flatten(), "from (1) to 2": nn.Linear(64, 10)}))

def plain():
    return nn.Sequential(nn.Flatten(), Bilinear())

class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(64, 64, 10)

    def forward(self, x):
        return self.layer(x, x)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    length = ("--updates", "15", "--batch-size", "64", "--lr", "0.05")
    done = kfc_here("train", "--data", "digits", "--optimizer", "sgd", *length, "--out", path)
    assert done.returncode == 0, done.stdout
    return path


@pytest.fixture
def own_networks(tmp_path, monkeypatch):
    (tmp_path / "inspectable.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inspected(*arguments):
    """Return the first inspection; in this process, progress precedes the JSON."""
    done = kfc_here("inspect", *arguments, "--json")
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])["inspections"][0]


# Output


def test_tables_and_a_page(run, tmp_path):
    done = kfc("inspect", run, *FEW, "--layer", "0", "--layer", "7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ("IAD", "SUD", "fails", "Frobenius", "0 (Conv2d)", "7 (Linear)", "+ SH = KFC", "PRONG")
    for word in (*words, "0: 3 batches of 8 examples, targets: all"):
        assert word in done.stdout
    assert f"Page: {tmp_path / 'inspect.html'}" in done.stdout
    page = (tmp_path / "inspect.html").read_text()
    for section in ("assumptions", "derivatives", "activations", "spectra", "approximations"):
        assert f'<section id="{section}">' in page
    assert "<script src=" not in page
    assert len(page) < 8e6
    assert [path.name for path in tmp_path.iterdir()] == ["inspect.html"]


def test_json_has_the_numbers_of_the_analysis(run, tmp_path):
    names = [*analysis.LADDER, "iad-wd"]
    options = [word for name in names for word in ("--approximation", name)]
    done = kfc("inspect", run, *FEW, *options, "--layer", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads(done.stdout)["inspections"][0]["layers"]
    assert "100%" in done.stderr, "progress goes elsewhere"
    assert ": 3\n" in done.stderr, "a line for the layer, where no bar moves"
    assert list(tmp_path.iterdir()) == [], "no page unless it is asked for"

    state = torch.load(run / "checkpoint.pt", weights_only=True)
    digits = load("digits")
    model = build("digits", image=(1, 8, 8), classes=10, init="kaiming", seed=0).eval()
    model.load_state_dict(state["averages"])
    images = Inputs.normalised(digits.train)(digits.train.images[:24])
    labels = torch.from_numpy(digits.train.labels[:24].copy())

    record = analysis.record_layer(model, images[:8], "3")
    correlations = torch.tensor(layer["correlations"]["derivative_offsets"])
    expected = analysis.correlations(record, 2).derivative_offsets
    torch.testing.assert_close(correlations, expected.float(), rtol=1e-3, atol=1e-5)
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    expected = analysis.measure_ladder(model, batches, ["3"], loss=F.cross_entropy, max_gib=0.5)[
        "3"
    ]
    assert layer["shape"] == list(expected.shape) == [1, 32, 145]
    assert layer["comparison"]["gradients"] == 80
    assert layer["comparison"]["batches"] == 3
    assert list(layer["comparison"]["approximations"]) == names
    for name, quality in expected.approximations.items():
        found = layer["comparison"]["approximations"][name]
        for measure in ("frobenius_error", "operator_error", "cosine", "decrease", "trace_ratio"):
            assert found[measure] == pytest.approx(getattr(quality, measure), rel=1e-3)
        assert found["positive"] is quality.positive
    for name, step in analysis.ladder_steps(expected).items():
        found = layer["assumptions"][name]
        assert (found["verdict"], found["measure"]) == (step.verdict, step.measure)
        for loss in ("trace", "frobenius", "decrease"):
            values = [getattr(getattr(step, loss), part) for part in ("value", "low", "high")]
            written = [found[loss][part] for part in ("value", "low", "high")]
            assert written == pytest.approx(values, rel=1e-2, abs=2e-3)
    spectrum = layer["comparison"]["approximations"]["kfc"]["spectrum"]
    expected = expected.approximations["kfc"].spectrum
    ranks = torch.tensor(spectrum["ranks"])
    assert len(ranks) <= 400
    assert ranks[-1] == spectrum["count"] == len(expected)
    values = torch.tensor(spectrum["values"], dtype=torch.float64)
    torch.testing.assert_close(
        values, expected[ranks - 1].double(), rtol=1e-3, atol=1e-5 * float(expected[0])
    )


def test_raw_parameters_differ_from_averaged_ones(run):
    arguments = (run, *FEW, "--layer", "7", "--approximation", "kfc")
    averaged, raw, again = (
        inspected(*arguments, *kind) for kind in ([], ["--parameters", "raw"], [])
    )
    for one in (averaged, raw, again):
        one["layers"][0].pop("seconds")
    assert averaged["layers"] == again["layers"]
    assert averaged["layers"] != raw["layers"]
    assert averaged["training"]["update"] == raw["training"]["update"] == 15
    assert averaged["training"]["train_loss"] != raw["training"]["train_loss"]
    assert raw["network"]["parameters"] == "raw"


def test_the_folder_of_a_run_is_unchanged(run):
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    inspected(run, *FEW, "--layer", "0", "--approximation", "kfc")
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def test_untrained_networks_side_by_side(own_networks):
    """Section 5.1: average pooling makes derivatives correlated, so that SUD loses more."""
    nets = ("--net", "inspectable:highest", "--net", "inspectable:average")
    rungs = ("--approximation", "iad", "--approximation", "iad-sud")
    arguments = ("--data", "digits", *nets, *FEW, "--examples", "64", "--layer", "0", *rungs)
    done = kfc("inspect", *arguments, "--json", "-o", "page.html")
    found = json.loads(done.stdout)["inspections"]
    assert [one["label"] for one in found] == ["inspectable:highest", "inspectable:average"]
    highest, average = (one["layers"][0]["assumptions"]["SUD"]["trace"] for one in found)
    assert highest["high"] < average["low"]
    assert "Page: " in done.stderr
    page = (own_networks / "page.html").read_text()
    for label in ("inspectable:highest", "inspectable:average"):
        assert f"{label}: correlation over space" in page


def test_runs_with_the_same_name_are_distinguished(run, tmp_path):
    arguments = (*FEW, "--layer", "0", "--approximation", "kfc", "-o", tmp_path / "page.html")
    done = kfc_here("inspect", run, run, *arguments)
    assert done.returncode == 0, done.stdout
    assert f"run ({run}): correlation over space" in (tmp_path / "page.html").read_text()


def test_an_autoencoder():
    net = ("--data", "digits", "--net", "digits-autoencoder", "--layer", "3")
    rungs = ("--approximation", "iad", "--approximation", "iad-wd")
    (layer,) = inspected(*net, *FEW, *rungs, "--samples", "4")["layers"]
    assert layer["correlations"] is None
    assert list(layer["assumptions"]) == ["IAD", "WD"]
    assert layer["targets"] == "4 drawn"
    (layer,) = inspected(*net, *FEW, *rungs)["layers"]
    assert layer["targets"] == "8 drawn", "64 pixels are too many to enumerate"


def test_names_of_layers_are_not_wrapped(own_networks):
    """Verdicts are wrapped before their intervals, not within them."""
    net = ("--data", "digits", "--net", "inspectable:wordy", "--approximation", "iad")
    done = kfc_here("inspect", *net, *FEW, "--examples", "128", "--batches", "6")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("Page: ")
    assert "from (1) to 2 " in done.stdout
    page = (own_networks / "inspect.html").read_text()
    assert '<th scope="row">from (1) to 2</th><td class=' in page
    assert re.search(r"<td class=\"\w+\">\w+ [\d.]+ \([-\d.]+\u00a0to\u00a0[\d.]+\) (of|in) ", page)


# Wrong arguments


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "name either folders of runs, or --net and --data"),
        (["--net", "digits"], 2, "data must be given"),
        (["--data", "imagenet"], 2, "data must be one of"),
        (["--data", "digits", "--net", "lenet"], 2, "net must be one of"),
        (["--data", "digits", "--layer", "conv9"], 2, "digits has no layer 'conv9'"),
        (["--data", "digits", "--approximation", "magic"], 2, "approximation must be one of"),
        (["--data", "digits", "--examples", "99999"], 2, "examples must be at most 1438"),
        (
            ["--data", "digits", "--examples", "1"],
            2,
            "examples must be a whole number of at least 2",
        ),
        (["--data", "digits", "--samples", "0"], 2, "samples must be"),
        (["--data", "digits", "--batches", "0"], 2, "batches must be"),
        (["--data", "digits", "--budget", "0"], 2, "must be a positive duration"),
        (
            ["--data", "digits", "--examples", "400", "--batches", "4"],
            2,
            "examples must be at most 359 for 4 batches",
        ),
        (["--data", "digits", "--damping", "0"], 2, "damping must be"),
        (["--data", "digits", "--memory", "-1"], 2, "memory must be"),
        (["--data", "digits", "--reach", "0"], 2, "reach must be"),
        (["--data", "digits", "--threads", "0"], 2, "threads must be"),
        (["--data", "digits", "--device", "meta"], 2, "device meta cannot be used here"),
        (["--data", "digits", "--parameters", "raw"], 2, "--parameters has no effect"),
        (["--data", "digits", "-o", "."], 2, "is a folder"),
        (["--data", "digits", "--net", "inspectable:plain"], 2, "no trained layer"),
        (["--data", "digits", "--net", "inspectable:normalised"], 2, "statistics of its batch"),
        (["nowhere"], 1, "is not a run"),
        (["nowhere", "--net", "digits"], 2, "name either folders of runs"),
    ],
)
def test_wrong_arguments(own_networks, arguments, code, words):
    assert_clear_error(kfc_here("inspect", *arguments), code, words)
    assert not list(own_networks.glob("*.html"))


def test_wrong_arguments_of_a_run(run, tmp_path):
    assert_clear_error(kfc("inspect", run, "--parameters", "best"), 2, "one of averaged, raw")
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert_clear_error(kfc_here("inspect", tmp_path), 1, "no checkpoint yet")
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    assert_clear_error(kfc_here("inspect", tmp_path), 1, "damaged")


@pytest.mark.parametrize("out", ["/proc/nowhere/page.html", "file/page.html"])
def test_the_page_must_be_writable_before_the_inspection_begins(own_networks, monkeypatch, out):
    command = import_module("kfc.lab.cli.inspect")
    monkeypatch.setattr(command, "inspect_network", lambda *_: pytest.fail("it began"))
    (own_networks / "file").touch()
    before = sorted(own_networks.iterdir())
    done = kfc_here("inspect", "--data", "digits", *FEW, "-o", out)
    assert_clear_error(done, 1, "could not be written")
    assert sorted(own_networks.iterdir()) == before


def test_the_default_page_must_not_be_a_folder(own_networks):
    (own_networks / "inspect.html").mkdir()
    assert_clear_error(kfc_here("inspect", "--data", "digits"), 2, "inspect.html is a folder")


def test_a_failed_inspection_leaves_no_folders(own_networks):
    before = sorted(own_networks.rglob("*"))
    net = ("--data", "digits", "--net", "inspectable:normalised", *FEW)
    done = kfc_here("inspect", *net, "-o", "new/folder/page.html")
    assert_clear_error(done, 2, "statistics of its batch")
    assert sorted(own_networks.rglob("*")) == before


def test_interruption_leaves_nothing(own_networks):
    (own_networks / "slow.py").write_text(
        "from inspectable import *\n"
        "class Slow(nn.Conv2d):\n"
        "    def forward(self, x):\n"
        "        open('began', 'a').write('x' * len(x))\n"
        "        return super().forward(x)\n"
        "def net():\n"
        "    return nn.Sequential(Slow(1, 32, 5), nn.Flatten(), nn.Linear(512, 10))\n"
    )
    running = start_kfc("inspect", "--data", "digits", "--net", "slow:net", "--examples", "1000")
    began = own_networks / "began"
    for _ in range(600):
        if began.exists() and began.stat().st_size > 100:
            break
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    running.wait()
    assert_clear_error(running.completed(), 130, "interrupted")
    assert not list(own_networks.glob("*.html*"))
    assert not list(own_networks.glob(".*"))


# Inspections


def test_progress_is_reported_by_layer():
    told = []
    inspection = inspect_small(
        network_of(small_network()), lambda *step: told.append(step), approximations=("kfc", "iad")
    )
    assert [layer.name for layer in inspection.layers] == ["conv1", "conv2", "fc"]
    # Layers with few parameters come first.
    assert list(dict.fromkeys(layer for layer, _, _ in told)) == ["conv1", "conv2", "fc"]
    parts = [part for _, _, part in told]
    assert parts == sorted(parts)
    assert parts[0] == 0
    assert parts[-1] < 1
    assert [step for layer, step, _ in told if layer == "fc"][-2:] == ["KFC", "IAD"]


def test_the_memory_limits_the_examples():
    """1 KiB holds the derivatives of two examples at most, and no unit-wise block."""
    network = network_of(small_network())
    settings = {"layers": ("conv1",), "approximations": ("kfc", "unit-wise")}
    inspection = inspect_small(network, memory=1 / 2**20, **settings)
    (layer,) = inspection.layers
    assert layer.examples == 2
    assert list(layer.comparison.approximations) == ["kfc"]
    assert any("unit-wise was left out" in note for note in layer.notes)
    assert "conv1: 3 batches of 2 examples" in notes_of(inspection)[-1]


class Clock:
    """A clock that advances by a given time with every example of a batch."""

    def __init__(self, monkeypatch, seconds_per_example):
        self.now, self.sizes = 0.0, []
        runner = import_module("kfc.lab.inspection.runner")
        monkeypatch.setattr(runner, "clock", lambda: self.now)
        add = analysis.Comparison.add

        def timed(comparison, record, gradient):
            add(comparison, record, gradient)
            self.now += seconds_per_example * record.examples
            self.sizes.append(record.examples)

        monkeypatch.setattr(runner.Comparison, "add", timed)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        # A second per example: a pilot of 16 s, then as large as five batches may be.
        (10.0, [16]),
        (120.0, [16] * 7),
        (320.0, [16, 32, 32, 32, 32, 32, 32, 32, 32]),
        (10_000.0, [16, *[128] * 8]),
    ],
)
def test_examples_and_batches_are_chosen_from_the_time(monkeypatch, budget, sizes):
    clock = Clock(monkeypatch, 1.0)
    network = network_of(small_network(), examples=1024)
    settings = InspectionSettings(layers=("fc",), budget=budget, approximations=("kfc",))
    (layer,) = inspect_network(network, settings).layers
    assert clock.sizes == sizes
    assert layer.examples == sizes[-1]
    assert layer.comparison.batches == sizes.count(sizes[-1])
    assert clock.now <= max(budget, 16) + 16
    if len(sizes) == 1:
        assert "no intervals" in notes_of(replace_layers(network, settings, layer))[-1]


def replace_layers(network, settings, *layers):
    return Inspection(network.label, {}, None, settings, {}, layers)


def test_layers_share_the_time(monkeypatch):
    clock = Clock(monkeypatch, 1.0)
    network = network_of(small_network(), examples=1024)
    settings = InspectionSettings(budget=400.0, approximations=("kfc",))
    inspect_network(network, settings)
    assert 200 < clock.now <= 400


def test_approximations_are_left_out_if_a_layer_takes_too_long(monkeypatch):
    """The first batch of a layer may take twice its share of the time. KFC is never left out."""
    clock = Clock(monkeypatch, 0.0)
    build = analysis.APPROXIMATIONS["iad"].build

    def slow(record):
        clock.now += 100.0
        return build(record)

    kind = replace(analysis.APPROXIMATIONS["iad"], build=slow)
    monkeypatch.setitem(analysis.APPROXIMATIONS, "iad", kind)
    network = network_of(small_network(), examples=64)
    settings = InspectionSettings(
        layers=("fc",), budget=10.0, approximations=("diagonal", "iad", "kfc", "sua")
    )
    (layer,) = inspect_network(network, settings).layers
    assert list(layer.comparison.approximations) == ["diagonal", "iad", "kfc"]
    assert layer.notes == ("sua was left out: no time was left",)


def test_an_approximation_that_cannot_be_solved_is_left_out(monkeypatch):
    def unsolvable(self, vector, damping, tolerance):
        raise UnsolvableError("the system was not solved")

    monkeypatch.setattr("kfc.analysis.independent.IndependentBlock.solve", unsolvable)
    network = network_of(small_network())
    (layer,) = inspect_small(network, layers=("conv1",), approximations=("iad", "kfc")).layers
    assert list(layer.comparison.approximations) == ["kfc"]
    assert layer.notes == ("iad was left out: the system was not solved",)


def test_a_layer_that_does_not_run_is_noted(tmp_path):
    model = small_network()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)
    inspection = inspect_small(network_of(model), layers=("fc", "spare"), approximations=("kfc",))
    assert "did not run" in inspection.layers[1].notes[0]
    assert verdict_rows(inspection)[2] == ("spare", "–", "–", "–", "–", "–")
    write_inspection_page(tmp_path / "page.html", [inspection], "Spare")
    assert "did not run" in (tmp_path / "page.html").read_text()
    with pytest.raises(ConfigError, match="did not run"):
        inspect_small(network_of(model), layers=("spare",))


def test_a_layer_whose_rows_do_not_belong_to_examples_is_noted():
    """The layer runs on 8 rows, even if there are 8 examples."""
    for examples in (36, 24, 12):
        inspection = inspect_small(network_of(ConstantRows(), examples=examples))
        constant, fc = inspection.layers
        assert "rows that do not belong to one" in constant.notes[0]
        assert constant.comparison is None
        assert fc.notes == ()
        assert fc.comparison is not None


def test_examples_may_be_the_second_dimension_unless_ambiguous():
    """The layer runs on (8, M, 5)."""
    for examples in (36, 6):
        (first, _) = inspect_small(network_of(SequenceFirst(), examples=examples)).layers
        assert first.notes == ()
        assert list(first.steps) == ["IAD", "SUD", "SH", "WD"]
    (first, _) = inspect_small(network_of(SequenceFirst(), examples=24)).layers
    assert "another number of examples" in first.notes[0]


def test_outputs_must_be_finite():
    model = small_network()
    model.fc.weight.data[0, 0] = math.inf
    with pytest.raises(ConfigError, match="not finite"):
        inspect_small(network_of(model))


def test_a_layer_without_derivatives_has_no_errors(tmp_path):
    """Errors relative to a block of zeros are undefined, and left out everywhere."""
    model = small_network()
    model.conv2.weight.data.zero_()  # conv1 has no derivatives any more
    inspection = inspect_small(network_of(model), approximations=("iad", "diagonal"))
    text = json.dumps(inspection.to_json(), allow_nan=False)
    assert json.loads(text)["format"] == 2
    for row in quality_rows(inspection.layers[0].comparison)[1:]:
        assert row[2:7] == ("–",) * 5
    write_inspection_page(tmp_path / "page.html", [inspection], "Dead")
    page = (tmp_path / "page.html").read_text()
    assert '<th scope="row">conv1</th><td>unknown</td>' in page
    (errors,) = (figure for figure in figures_in(page) if figure.id == "errors-0")
    marks = {trace["name"]: trace["y"] for trace in errors.variants[0]}
    assert marks["conv1"] == [None, None]
    assert all(error > 0 for error in marks["fc"])


def test_numbers_have_intervals_if_there_are_three_batches():
    for rows, cell in ((3, "0.2 ± 0.05"), (0, "0.2")):
        without = torch.tensor([[1.0, 0.2, 1.0], [1.0, 0.21, 1.0], [1.0, 0.19, 1.0]])[:rows]
        quality = analysis.Quality(0.2, 0.0, 0.1, 0.9, 0.8, 1.0, 0.0, True, None, without)
        comparison = analysis.LayerComparison(
            "fc", (1, 2, 3), 1, 1, 3, 4, 1.0, 1.0, None, 1.0, 0.5, {"kfc": quality}, {}
        )
        assert quality_rows(comparison)[1][3] == cell


@pytest.fixture
def figures_of(tmp_path):
    """Return a function that writes a page about inspections and returns its figures."""

    def write(*inspections):
        write_inspection_page(tmp_path / "page.html", inspections, "Figures")
        return figures_in((tmp_path / "page.html").read_text())

    return write


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="approximation must be one of"):
        InspectionSettings(approximations=("magic",))


def test_ranks_are_thinned_on_a_logarithmic_scale():
    assert thinned_ranks(5) == [1, 2, 3, 4, 5]
    assert thinned_ranks(0) == []
    ranks = thinned_ranks(10**6)
    assert len(ranks) <= 400
    assert (ranks[0], ranks[-1]) == (1, 10**6)
    assert ranks == sorted(set(ranks))


# Figures


def test_every_figure_is_valid_plotly(figures_of, tmp_path):
    inspections = [
        inspect_small(network_of(small_network(pooling), pooling), approximations=("iad", "kfc"))
        for pooling in ("max", "average")
    ]
    figures = figures_of(*inspections)
    # Two pictures of two kinds of two layers, three spectra, three figures of numbers; each twice.
    # The first layer has one input map, so there are no correlations between its maps.
    assert len(figures) == 2 * (2 * 2 * 2 - 1 + 3 + 3)
    assert len({figure.id for figure in figures}) == len(figures)
    for figure in figures:
        for traces in figure.variants:
            go.Figure(traces, figure.layout)
    maps = [figure for figure in figures if figure.id.startswith("derivatives")]
    assert {figure.layout["coloraxis"]["cmax"] for figure in maps} == {1}
    write_inspection_page(tmp_path / "page.html", inspections, "Pooling")
    page = (tmp_path / "page.html").read_text()
    definitions = dict(re.findall(r"<dt>(\w+)</dt><dd>([^<]+)</dd>", page))
    assert tuple(definitions) == ASSUMPTIONS
    assert definitions["WD"].startswith("white derivatives, on top of IAD: uncorrelated over maps")
    assert '<td class="fails">fails ' in page
    verdicts = [page.count(f'<td class="{name}">{name} ') for name in ("holds", "roughly", "fails")]
    hold, roughly, fail = verdicts
    assert f"Of the tested assumptions, {hold} hold, {roughly} hold roughly and {fail} fail" in page
    decreases = [
        layer.comparison.approximations["kfc"].decrease
        for one in inspections
        for layer in one.layers
        if layer.comparison
    ]
    assert f"a step of KFC lowers the loss by {median(decreases):.0%} of what" in page


@pytest.mark.parametrize(
    ("dims", "kind"), [(1, "scatter"), (2, "heatmap"), (3, "heatmap"), (4, "heatmap")]
)
def test_pictures_of_any_dimension(dims, kind):
    offsets = torch.linspace(-1, 1, 9 * 3**dims).reshape(9, *(3,) * dims)
    figure = offset_figure("id", "title", offsets)
    (traces,) = figure.variants
    assert [trace["type"] for trace in traces] == [kind] * 4
    assert [trace["name"] for trace in traces] == ["map 1", "map 4", "map 7", "mean of 9 maps"]
    go.Figure(traces, figure.layout)
    slices = "The offset is 0 in all dimensions but the last two."
    assert figure.caption.endswith(slices) == (dims > 2)
    if dims == 3:
        expected = offsets[1, 1].abs().tolist()
        assert traces[0]["z"] == [[round(value, 3) for value in row] for row in expected]


@pytest.mark.parametrize("single", ["derivative_offsets", "activation_offsets"])
def test_only_one_side_of_a_layer_may_have_locations(figures_of, single):
    inspection = inspect_small(network_of(small_network()), layers=("conv2",), approximations=())
    (layer,) = inspection.layers
    layer = replace(layer, correlations=replace(layer.correlations, **{single: None}))
    inspection = replace(inspection, layers=(layer,))
    pictures = {f"{kind}-0-0-{what}" for kind in KINDS for what in ("offsets", "maps")}
    pictures.add("spectrum-0-0")  # of the exact block
    found = {figure.id for figure in figures_of(inspection)}
    assert found == pictures - {f"{single.replace('_offsets', 's')}-0-0-offsets"}
    assert inspection.to_json()["layers"][0]["correlations"][single] is None


def test_tokens_are_locations_of_one_dimension(figures_of):
    model = nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, 3), nn.Flatten(), nn.Linear(24, 4))
    rungs = (*analysis.LADDER, "iad-wd")
    inspection = inspect_small(network_of(model), layers=("1",), approximations=rungs)
    (layer,) = inspection.layers
    assert set(layer.steps) == set(ASSUMPTIONS) - {"SUA"}
    types = {figure.id: figure.variants[0][0]["type"] for figure in figures_of(inspection)}
    assert types["derivatives-0-0-offsets"] == types["activations-0-0-offsets"] == "scatter"


def test_a_convolution_to_a_single_location(figures_of):
    model = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten())
    inspection = inspect_small(network_of(model), approximations=("kfc", "sua"))
    header, row = verdict_rows(inspection)
    cells = dict(zip(header, row, strict=True))
    assert cells["SUD"] == "–"
    assert cells["SUA"] != "–"
    ids = {figure.id for figure in figures_of(inspection)}
    assert "derivatives-0-0-offsets" not in ids
    assert "activations-0-0-offsets" in ids


def test_few_maps_dead_maps_and_many_maps():
    offsets = torch.ones(5, 3, 3)
    offsets[1:4] = 0
    assert shown_maps(offsets) == [0, 4]
    figure = offset_figure("id", "title", offsets)
    assert figure.variants[0][-1]["name"] == "mean of 2 maps"
    assert figure.variants[0][-1]["z"] == [[1.0] * 3] * 3
    assert figure.caption.endswith("the mean of all maps but 3 dead ones.")
    for count in range(4):
        figure = offset_figure("id", "title", torch.ones(max(count, 1), 3, 3) * bool(count))
        (traces,) = figure.variants
        assert len(traces) == count + 1
        go.Figure(traces, figure.layout)
    (traces,) = cross_map_figure("id", "title", torch.eye(3 * MOST_MAPS)).variants
    assert len(traces[0]["z"]) == MOST_MAPS
