"""Tests of `kfc inspect --advise`: the choice of approximations, and a command that trains."""

import json
import shlex
from dataclasses import replace

import pytest
import torch

from commands import assert_clear_error, kfc_here
from inspected_networks import inspect_small, network_of, small_network
from kfc.lab.inspection.advice import PLAIN, Choice, advise, allocate, overall
from kfc.lab.report.advice import advice_notes
from kfc.lab.report.inspection import write_inspection_page

FEW = ("--examples", "8", "--batches", "3", "--reach", "2", "--threads", "1")


def choices(**layers):
    """Return the choices of every layer from (seconds, value) by name."""
    return {
        layer: {
            name: Choice(name, *numbers) for name, numbers in {PLAIN: (0.0, 0.1), **own}.items()
        }
        for layer, own in layers.items()
    }


def test_the_most_valuable_changes_come_first():
    known = choices(first={"kfc": (4.0, 5.1), "prong": (1.0, 3.1)}, second={"kfc": (4.0, 1.1)})

    def chosen(allowance):
        return [choice.name for choice in allocate(known, allowance).values()]

    assert chosen(0.5) == [PLAIN, PLAIN]
    assert chosen(1.0) == ["prong", PLAIN]
    assert chosen(4.5) == ["kfc", PLAIN]
    assert chosen(8.0) == ["kfc", "kfc"]


def test_approximations_without_value_are_not_chosen():
    known = choices(only={"kfc": (1.0, 0.05)})
    assert allocate(known, 100.0)["only"].name == PLAIN


def test_only_what_was_measured_in_every_layer_is_best_for_all():
    known = choices(
        first={"kfc": (1.0, 2.0), "prong": (0.1, 9.0), "sua": (1.0, 3.0)},
        second={"kfc": (1.0, 2.0)},
    )
    assert overall(known, 1e9, {}) == "kfc"
    assert overall(known, 1e9, {"second"}) == "sua", "in layers with one offset, SUA is KFC"
    assert overall(choices(only={"ekfac": (1.0, 2.0)}), 1e9, {}) == "ekfac"
    assert overall(known, 1e-9, {}) == "kfc", "nothing else is cheaper"


def test_advice_follows_from_the_inspection():
    network = network_of(small_network(), examples=48)
    names = ("kfc", "sua", "prong")
    inspection = inspect_small(network, approximations=names)
    advice = advise(network, inspection, 1e9)
    assert [each.layer for each in advice.layers] == ["conv1", "conv2", "fc"]
    for each, layer in zip(advice.layers, inspection.layers, strict=True):
        found = layer.comparison.approximations
        # For one offset, SUA is KFC up to rounding, and is not a choice.
        own = names if layer.comparison.offsets > 1 else ("kfc", "prong")
        decreases = {name: found[name].decrease for name in own}
        decreases[PLAIN] = layer.comparison.plain_decrease
        assert each.approximation == max(decreases, key=decreases.get), "everything is affordable"
        assert each.decrease == decreases[each.approximation]
        assert each.trace_correction == pytest.approx(1 / found["kfc"].trace_ratio)
        assert each.seconds > 0
    assert sum(each.time_share for each in advice.layers) == pytest.approx(1)
    nothing = advise(network, inspection, 1e-12)
    assert {each.approximation for each in nothing.layers} == {PLAIN}
    groups = [{"prefix": name, "treatment": "plain"} for name in ("conv1", "conv2", "fc")]
    assert f"groups={groups!r}" in nothing.call
    wasteful = [each for each in nothing.layers if each.wastes_time]
    assert len(advice_notes(nothing)) == 3 + len(wasteful)


def test_layers_without_derivatives_need_no_curvature():
    model = small_network()
    model.conv2.weight.data.zero_()  # conv1 has no derivatives any more
    network = network_of(model)
    advice = advise(network, inspect_small(network, approximations=("kfc",)), 1e9)
    assert advice.layers[0].approximation == PLAIN


def test_there_is_no_advice_for_what_was_not_measured():
    network = network_of(small_network())
    inspection = inspect_small(network, approximations=("iad", "kfc"))
    first, *others = inspection.layers
    measured = {"iad": first.comparison.approximations["iad"]}
    unknown = replace(first, comparison=replace(first.comparison, approximations=measured))
    advice = advise(network, replace(inspection, layers=(unknown, *others)), 1e-12)
    assert [each.layer for each in advice.layers] == ["conv2", "fc"]
    assert "conv1" not in advice.call


def test_the_call_in_python_trains():
    import kfc

    network = network_of(small_network(), examples=48)
    inspection = inspect_small(network, approximations=("kfc", "sua"))
    model = small_network()
    for overhead in (1e9, 1e-12):
        optimizer = eval(advise(network, inspection, overhead).call)
        torch.nn.functional.cross_entropy(model(network.images), network.labels).backward()
        optimizer.step()
        assert isinstance(optimizer, kfc.KFC)


def test_the_command_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = ("--data", "digits", "--approximation", "kfc", "--approximation", "ekfac")
    done = kfc_here("inspect", *net, *FEW, "--advise", "--overhead", "0.5", "--json")
    assert done.returncode == 0, done.stdout
    advice = json.loads(done.stdout.splitlines()[-1])["inspections"][0]["advice"]
    assert advice["overhead"] == 0.5
    program, *arguments = shlex.split(advice["command"])
    assert program == "kfc"
    done = kfc_here(*arguments, "--updates", "3", "--out", "run")
    assert done.returncode == 0, done.stdout
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["options"]["curvature"] == advice["curvature"]
    assert config["options"]["overhead"] == 0.5


def test_advice_is_on_the_page_and_in_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = ("--data", "digits", "--approximation", "kfc", "--layer", "7")
    done = kfc_here("inspect", *net, *FEW, "--advise")
    assert done.returncode == 0, done.stdout
    assert "trace correction" in done.stdout
    assert "Train: kfc train --data digits" in " ".join(done.stdout.split())
    assert '<section id="advice">' in (tmp_path / "inspect.html").read_text()


def test_pages_without_advice_do_not_mention_it(tmp_path):
    inspection = inspect_small(network_of(small_network()), approximations=("kfc",))
    write_inspection_page(tmp_path / "page.html", [inspection], "Plain")
    assert "Advice for training" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--overhead", "0.1"], "no effect without --advise"),
        (["--advise", "--overhead", "0"], "must be a positive number, got 0"),
        (["--advise", "--approximation", "iad"], "--advise needs one that training offers"),
    ],
)
def test_wrong_options(options, words):
    assert_clear_error(kfc_here("inspect", "--data", "digits", *options), 2, words)
