"""The benchmark of `kfc compare suite`: workloads, runs in turn, resumption, page and command."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from commands import assert_clear_error, kfc_here, start_kfc
from kfc.lab.data import Split, load
from kfc.lab.disk import RunError
from kfc.lab.report.suite import (
    failures,
    final_test_rows,
    growth_rows,
    score_rows,
    time_rows,
    write_suite_page,
)
from kfc.lab.suite import benchmark as benchmark_module
from kfc.lab.suite.benchmark import Benchmark, load_problem, warm_up
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.problems import (
    BACKGROUND,
    CANVAS_SIDE,
    canvases,
    cropped_and_flipped,
    make_problem,
    sequences,
)
from kfc.lab.suite.results import Results
from kfc.lab.suite.search import DEFAULTS, Setting, settings_of
from kfc.lab.suite.store import RULESETS, BenchmarkSettings, Entry, Record, Store
from kfc.lab.suite.trial import Outcome, Trial
from kfc.lab.suite.workloads import SUITE_TASKS, WORKLOADS
from written_pages import figures_in

INSTALLED = [name for name, method in METHODS.items() if method.missing() is None]


METHODS_OF_TESTS = ("SGD", "AdamW", "KFC")


class Ticks:
    """A clock that advances by a fixed time at each call."""

    def __init__(self, step=0.5):
        self._step = step
        self._calls = 0

    def __call__(self):
        self._calls += 1
        return self._step * self._calls


@pytest.fixture(scope="module")
def digits():
    return make_problem(load("digits"), "images", "normalised")


def tiny(name="digits", **changes):
    given = {
        "name": name,
        "seconds": 12.0,
        "target": 1.0,
        "examples": 100,
        "evaluations": 40,
        **changes,
    }
    return replace(WORKLOADS["digits"], **given)


@pytest.fixture(scope="module")
def two_workloads():
    """Replace the workloads by two on the digits, of which the second cannot be solved."""
    known = {"digits": tiny(), "hopeless": tiny("hopeless", target=-1.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_module, "WORKLOADS", known)
        load_problem.cache_clear()
        yield list(known)
    load_problem.cache_clear()


def settings(names, **changes):
    base = BenchmarkSettings(
        workloads=tuple(names),
        methods=METHODS_OF_TESTS,
        rulesets=RULESETS,
        seeds=2,
        trials=4,
        hours=1.0,
        quick=False,
        threads=1,
        limit_factor=1.0,
        digests={name: load("digits").digest for name in names},
        environment={"torch": torch.__version__},
    )
    return replace(base, **changes)


def results_of(benchmark, complete=True):
    return Results(
        benchmark.settings,
        benchmark.workloads,
        benchmark.store.spent,
        complete,
        benchmark.records(),
    )


def weights_of(trial):
    return trial.state_dict()["model"]


# Workloads


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda each: each.name)
def test_networks_fit_their_tasks(workload):
    shape = {"sequences": (1, 784), "canvases": (1, CANVAS_SIDE, CANVAS_SIDE)}.get(workload.form)
    sizes = {"digits": (1, 8, 8), "mnist": (1, 28, 28)}
    images = torch.rand(2, *(shape or sizes.get(workload.data, (3, 32, 32))))
    labels = torch.zeros(2, dtype=torch.long)
    if workload.form == "canvases":
        labels = torch.zeros(2, CANVAS_SIDE, CANVAS_SIDE, dtype=torch.long)
    model, task = workload.build(0), SUITE_TASKS[workload.task]
    outputs = model(images)
    classes = BACKGROUND + 1 if workload.form == "canvases" else 10
    assert outputs.shape == task.output_shape(images, classes)
    task.loss(outputs, images, labels).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert task.mistakes(outputs, images, labels).shape == (2,)
    again, other = (dict(workload.build(seed).named_parameters()) for seed in (0, 1))
    assert all(torch.equal(again[key], value) for key, value in model.named_parameters())
    assert any(not torch.equal(other[key], value) for key, value in again.items())


def test_the_quick_version_fits_into_ten_minutes():
    quick = [each.adjusted(True, 1.0) for each in WORKLOADS.values() if each.quick]
    assert len(quick) >= 3
    assert len(METHODS) * sum(each.seconds for each in quick) <= 500


def test_time_limits_can_be_multiplied(two_workloads, tmp_path):
    store = Store.create(tmp_path / "suite", settings(two_workloads, limit_factor=1.5))
    assert [each.seconds for each in Benchmark(store).workloads] == [18.0, 18.0]
    assert [each.target for each in Benchmark(store).workloads] == [1.0, -1.0]


def test_the_digit_that_is_brighter_owns_a_pixel():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (20, 1, 28, 28), dtype=torch.uint8, generator=generator).numpy()
    labels = torch.arange(20).remainder(10).numpy()
    split = Split(images, labels)
    made, again = canvases(split, "test"), canvases(split, "test")
    assert (made.images == again.images).all()
    assert (made.labels == again.labels).all()
    assert made.images.shape[1:] == (1, CANVAS_SIDE, CANVAS_SIDE)
    assert made.labels.shape == (len(made.images), CANVAS_SIDE, CANVAS_SIDE)
    dark = made.images[:, 0] < 64
    assert (made.labels[dark] == BACKGROUND).all()
    assert (made.labels[~dark] != BACKGROUND).all()


def test_sequences_scan_rows(digits):
    made = sequences(digits.train)
    assert made.images.shape == (1438, 1, 64)
    assert (made.images[3, 0, 8:16] == digits.train.images[3, 0, 1]).all()


def test_augmented_images_are_shifted_and_flipped_copies():
    images = torch.rand(40, 3, 6, 5)
    made = cropped_and_flipped(images, torch.Generator().manual_seed(0), margin=1)
    assert made.shape == images.shape
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    kinds = set()
    for image, source in zip(made, padded, strict=True):
        matches = [
            (top, left, flip)
            for top in range(3)
            for left in range(3)
            for flip in (False, True)
            if torch.equal(
                image.flip(2) if flip else image, source[:, top : top + 6, left : left + 5]
            )
        ]
        assert len(matches) == 1
        kinds |= set(matches)
    assert len(kinds) > 10


# One run


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("tuned", [False, True])
def test_every_method_continues_bit_for_bit(name, tuned, digits):
    warm_up(name)
    setting = settings_of(METHODS[name], 2)[1] if tuned else DEFAULTS
    make = partial(Trial, tiny(target=-1.0), digits, name, setting, 3)
    whole = make(Ticks())
    whole.advance(5.0)
    first = make(Ticks())
    first.advance(2.5)
    second = make(Ticks())
    second.load_state_dict(first.state_dict())
    second.advance(5.0)
    assert second.outcome == whole.outcome
    assert whole.outcome.updates == 10
    for key, value in weights_of(whole).items():
        assert torch.equal(weights_of(second)[key], value), key


def test_a_run_ends_at_its_target_and_counts_training_time_only(digits):
    trial = Trial(tiny(), digits, "AdamW", Setting({"lr": 0.01}), 0, Ticks(0.125))
    trial.advance(math.inf)
    outcome = trial.outcome
    assert outcome.end == "target"
    assert outcome.time == outcome.seconds == 0.125 * outcome.updates
    assert outcome.curve[-1][2] <= 1.0 < outcome.curve[-2][2]
    assert 1 <= outcome.loss_growth < 2


def test_the_whole_test_split_is_evaluated_when_a_run_ends(digits):
    trial = Trial(tiny(), digits, "AdamW", Setting({"lr": 0.01}), 0, Ticks(0.125))
    trial.advance(0.5)
    assert trial.outcome.test == math.inf
    trial.advance(math.inf)
    model = tiny().build(0).eval()
    model.load_state_dict(weights_of(trial))
    outputs = model(digits.inputs(digits.test.images))
    labels = torch.from_numpy(digits.test.labels.copy())
    expected = torch.nn.functional.cross_entropy(outputs, labels).item()
    assert trial.outcome.test == pytest.approx(expected, rel=1e-5)


def test_averages_are_evaluated_if_they_are_a_part_of_the_method(digits):
    trial = Trial(tiny(), digits, "WhitenedAdam", Setting(), 0, Ticks(0.125))
    trial.advance(1.0)
    before = weights_of(trial)
    with trial._optimizer.averaged_parameters():
        expected = trial._metric_as_is("train", 100)
    assert trial._metric("train", 100) == expected != trial._metric_as_is("train", 100)
    torch.testing.assert_close(weights_of(trial), before, rtol=0, atol=0)


def test_a_falling_schedule_ends_the_run(digits):
    setting = settings_of(METHODS["SGD"], 2)[1]
    trial = Trial(tiny(target=-1.0), digits, "SGD", setting, 0, Ticks())
    trial.advance(math.inf)
    assert (trial.outcome.end, trial.outcome.seconds) == ("schedule", 6)
    assert trial.outcome.time == math.inf


def test_a_run_that_diverges_is_named(digits):
    trial = Trial(tiny(), digits, "SGD", Setting({"lr": 1e18}), 0, Ticks())
    trial.advance(math.inf)
    assert trial.outcome.end == "diverged"
    assert trial.outcome.test == math.inf
    assert trial.outcome.message.endswith("is nan")
    assert trial.outcome.loss_growth == math.inf


def test_muon_trains_views_of_convolution_weights():
    model = WORKLOADS["vit"].build(0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = METHODS["Muon"].make(model)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    model(torch.rand(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    moved = [
        name for name, value in model.named_parameters() if not torch.equal(value, before[name])
    ]
    assert {"patches.weight", "positions", "blocks.0.mlp.0.weight", "linear.weight"} <= set(moved)


# The benchmark


@pytest.fixture(scope="module")
def finished(two_workloads, tmp_path_factory):
    store = Store.create(tmp_path_factory.mktemp("whole") / "new", settings(two_workloads))
    benchmark = Benchmark(store, clock=Ticks())
    assert benchmark.run()
    return benchmark


def test_runs_take_turns_and_only_the_best_trials_continue(finished):
    records = finished.records()
    results = results_of(finished)
    untuned, tuned = results.rulesets
    assert set(untuned.times) == {"digits", "hopeless"}
    assert untuned.seeds == tuned.seeds == {"digits": 2, "hopeless": 2}
    assert all(math.isinf(time) for time in tuned.times["hopeless"].values())
    assert min(tuned.times["digits"].values()) < math.inf
    for method in ("SGD", "AdamW", "KFC"):
        own = [r for r in records if (r.entry.method, r.entry.workload) == (method, "hopeless")]
        first = [r.outcome for r in own if (r.entry.ruleset, r.entry.seed) == ("tuned", 0)]
        assert [len(first), sum(each.end == "dropped" for each in first)] == [4, 2]
        second = [r for r in own if (r.entry.ruleset, r.entry.seed) == ("tuned", 1)]
        assert len(second) == 1
    assert not list((finished.store.folder / "runs").glob("*.pt"))


def test_an_interrupted_benchmark_resumes_to_the_same_results(finished, two_workloads, tmp_path):
    store = Store.create(tmp_path / "parts", settings(two_workloads))
    sessions = 0
    for _ in range(500):
        turns = []
        benchmark = Benchmark(
            Store(tmp_path / "parts"),
            on_turn=lambda current, record, turns=turns: turns.append(record),
            interrupted=lambda turns=turns: len(turns) >= 40,
            clock=Ticks(),
        )
        sessions += 1
        if benchmark.run():
            break
    assert sessions > 5
    whole = {record.entry.name: record.outcome for record in finished.records()}
    parts = {record.entry.name: record.outcome for record in benchmark.records()}
    assert parts == whole
    assert results_of(benchmark).to_json()["rulesets"] == results_of(finished).to_json()["rulesets"]
    assert store.spent > 0


def test_a_benchmark_out_of_time_reports_what_is_complete(two_workloads, tmp_path):
    store = Store.create(tmp_path / "new", settings(two_workloads))
    turns = []
    benchmark = Benchmark(
        store,
        on_turn=lambda current, record: turns.append(current),
        interrupted=lambda: bool(turns) and turns[-1].ruleset == "tuned",
        clock=Ticks(),
    )
    assert not benchmark.run()
    results = results_of(benchmark, complete=False)
    assert [ruleset.name for ruleset in results.rulesets] == ["untuned"]
    write_suite_page(tmp_path / "page.html", results)
    assert "not complete" in (tmp_path / "page.html").read_text()
    store.set_spent(4000.0)
    late = Benchmark(store)
    assert late.is_out_of_time
    assert not late.run()


def test_a_round_counts_only_when_all_its_runs_have_ended(results):
    early = [replace(each, entry=replace(each.entry, ruleset="tuned")) for each in results.records]
    assert [ruleset.name for ruleset in replace(results, records=early).rulesets] == []


def test_a_benchmark_needs_the_data_it_began_with(two_workloads, tmp_path):
    digests = dict.fromkeys(two_workloads, "other")
    store = Store.create(tmp_path / "new", settings(two_workloads, digests=digests))
    with pytest.raises(RunError, match="begun with other data"):
        Benchmark(store).run()
    (tmp_path / "new" / "suite.json").write_text("{")
    with pytest.raises(RunError, match="not the folder of a suite"):
        Store(tmp_path / "new")


# The report


def record(workload, ruleset, method, time, growth=1.0, end="target", seed=0, test=math.inf):
    curve = [(1.0, 10, 5.0), (min(time, 100.0), 20, 0.5)]
    message = "why" if end == "diverged" else ""
    outcome = Outcome(curve, curve[-1][0], 20, 1.0, growth, end, message, test)
    return Record(Entry(workload, ruleset, method, 0, seed, DEFAULTS), outcome)


@pytest.fixture
def results():
    records = [
        record("digits", "untuned", "SGD", 20.0, test=0.125),
        record("digits", "untuned", "AdamW", 12.0),
        record("digits", "untuned", "KFC", 10.0, growth=1.5),
        record("cifar10", "untuned", "SGD", math.inf, end="diverged"),
        record("cifar10", "untuned", "AdamW", 30.0, test=20.25),
        record("cifar10", "untuned", "KFC", math.inf, end="limit"),
    ]
    chosen = [WORKLOADS["digits"], WORKLOADS["cifar10"]]
    return Results(settings(["digits", "cifar10"], seeds=1), chosen, 60.0, True, records)


def test_tables_of_a_benchmark(results):
    [ruleset] = results.rulesets
    assert time_rows(results, ruleset)[1][3:] == ("20 (2.0x)", "12 (1.2x)", "10 (1.0x)")
    assert time_rows(results, ruleset)[2][3:] == ("not reached", "30 (1.0x)", "not reached")
    assert time_rows(results, ruleset, brief=True)[2] == ("cifar10", "∞", "30 (1.0x)", "∞")
    scores = {row[0]: row[1:] for row in score_rows(results, ruleset)[1:]}
    assert list(scores) == ["AdamW", "KFC", "SGD"]
    assert scores["AdamW"] == ("0.967", f"{1.2**0.5:.2f}", "1", "2 of 2")
    # A run ends at four times the fastest.
    assert scores["KFC"] == ("0.500", "≥ 2.00", "1", "1 of 2")
    assert growth_rows(results, ruleset)[1:][0][1:] == ("1.00", "1.00", "1.50")
    assert growth_rows(results, ruleset)[2][1:] == ("diverged", "1.00", "1.00")
    assert final_test_rows(results, ruleset)[1:] == [
        (WORKLOADS["digits"].title, "0.125", "-", "-"),
        (WORKLOADS["cifar10"].title, "-", "20.2%", "-"),
    ]
    diverged, grown = failures(results)
    assert "SGD diverged on cifar10" in diverged
    assert "KFC on digits" in grown
    assert "1.50 times" in grown


def test_results_are_valid_json(results):
    plain = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert plain["rulesets"]["untuned"]["times"]["cifar10"] == {
        "SGD": None,
        "AdamW": 30.0,
        "KFC": None,
    }
    assert len(plain["runs"]) == 6


def test_the_page_has_profiles_curves_and_tables(results, tmp_path):
    write_suite_page(tmp_path / "page.html", results)
    scores = score_rows(results, results.rulesets[0])[1:]
    page = (tmp_path / "page.html").read_text()
    best, score, _, firsts, _ = scores[0]
    assert f"Untuned, {best} has the best score ({float(score):.2f})" in page
    assert f"fastest on {firsts} of 2 workloads" in page
    figures = {figure.id: figure for figure in figures_in(page)}
    assert set(figures) == {
        *("profile-untuned", "curve-untuned-digits", "curve-untuned-cifar10"),
    }
    [traces] = figures["profile-untuned"].variants
    steps = {trace["name"]: (trace["x"], trace["y"]) for trace in traces}
    assert steps["SGD"] == ([1, 2, 4], [0, 0.5, 0.5])
    assert steps["AdamW"] == ([1, 1.2, 4], [0.5, 1, 1])
    for words in ("SGD diverged on cifar10", "not reached", "6% training error"):
        assert words in page


# The command


def test_wrong_arguments_of_the_suite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    few = ["--workloads", "digits", "--methods", "SGD"]
    for arguments, code, words in [
        (["--workloads", "cifar11"], 2, "must be one of digits, cifar10"),
        (["--methods", "sgd"], 2, "must be one of SGD, AdamW"),
        (["--methods", ","], 2, "must be one of"),
        (["--ruleset", "none"], 2, "must be one of untuned, tuned, both"),
        ([*few, "--hours", "-1"], 2, "must be a positive number"),
        ([*few, "--hours", "0"], 2, "must be a positive number"),
        ([*few, "--limit-factor", "nan"], 2, "must be a positive number"),
        ([*few, "--ruleset", "untuned", "--trials", "3"], 2, "has no effect without the tuned"),
        ([*few, "--out", "there"], 1, "never overwritten"),
        (["--resume", "there"], 1, "not the folder of a suite"),
        (["--resume", "there", "--seeds", "2"], 2, "only --hours can be changed"),
        (["--quick", "--workloads", "cifar10"], 2, "must be one of digits"),
    ]:
        assert_clear_error(kfc_here("compare", "suite", *arguments), code, words)
    assert_clear_error(kfc_here("compare", "--quick", "suite"), 2, "kfc compare suite --quick")


def test_a_method_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kfc.lab.suite.methods.find_spec", lambda name: None)
    done = kfc_here("compare", "suite", "--methods", "SOAP", "--workloads", "digits")
    assert_clear_error(done, 2, "SOAP needs the package pytorch-optimizer: pip install")


@pytest.mark.slow
def test_a_killed_benchmark_of_two_workloads_continues(tmp_path):
    arguments = ["--quick", "--workloads", "digits,autoencoder", "--methods", "SGD,KFC"]
    running = start_kfc(
        "compare", "suite", *arguments, "--threads", 1, "--out", "result", cwd=tmp_path
    )
    folder = tmp_path / "result" / "runs"
    for _ in range(600):
        if list(folder.glob("*.pt")):
            break
        running._process.join(0.1)
    running.kill()
    assert not (tmp_path / "result" / "report.html").exists()
    done = start_kfc("compare", "suite", "--resume", "result", cwd=tmp_path).completed()
    assert done.returncode == 0, done.stdout + done.stderr
    plain = json.loads((tmp_path / "result" / "results.json").read_text())
    assert plain["complete"]
    assert plain["rulesets"]["untuned"]["times"]["digits"]["KFC"] is not None
    for words in ("score", "geometric mean", "KFC", "training loss"):
        assert words in done.stdout
