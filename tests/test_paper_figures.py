"""The figures and tables of the paper's experiments, from recorded curves."""

from xml.etree import ElementTree

import paper_curves
import paper_figures
import pytest
from drawing import Axis

from report_runs import make_run

RESULTS = sorted(paper_curves.RESULTS.glob("*.jsonl"))


# The committed results


def test_the_document_shows_the_recorded_results():
    page = paper_figures.PAGE.read_text(encoding="utf-8")
    assert paper_figures.with_tables(page) == page, "run make figures"


def test_the_pictures_show_the_recorded_results():
    pictures = paper_figures.pictures()
    committed = {path.name: path.read_text() for path in paper_figures.PICTURES.glob("paper-*.svg")}
    assert committed == pictures, "run make figures"
    for picture in pictures.values():
        ElementTree.fromstring(picture)
    page = paper_figures.PAGE.read_text(encoding="utf-8")
    assert all(f"](pictures/{name})" in page for name in pictures)


def test_the_recorded_results_are_small():
    assert RESULTS
    assert sum(path.stat().st_size for path in RESULTS) < 500_000


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_recorded_curves_go_forward(path):
    curves = paper_curves.read_curves(path.stem)
    assert curves
    for curve in curves:
        for count in paper_curves.COUNTS:
            values = [row[count] for row in curve.rows]
            assert values == sorted(values), (curve.name, count)


# Collecting and reading


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Record a comparison of four runs, in an empty folder of results."""
    folder = tmp_path / "runs" / "figure4"
    folder.mkdir(parents=True)
    (folder / "comparison.json").write_text("{}")
    make_run(folder / "kfc", "KFC", "kfc", lr=0.003, evaluations=9)
    make_run(folder / "sgd", "SGD", "sgd", lr=0.01, evaluations=9, end=None)
    make_run(folder / "sgd-large", "SGD", "sgd", lr=0.1, end="not chosen")
    make_run(folder / "kfc-bn", "KFC, BN", "kfc", evaluations=1, end=None)  # just begun
    make_run(folder / "sgd-bn", "SGD, BN", "sgd", lr=0.01, evaluations=3, end="diverged")
    monkeypatch.setattr(paper_curves, "RESULTS", tmp_path / "results")
    paper_curves.collect(tmp_path / "runs")
    return paper_curves.chosen("figure4")


def test_curves_are_recorded_and_read(results):
    assert set(results) == {"KFC", "SGD", "SGD, BN"}
    assert results["KFC"].end == "epochs"
    assert results["SGD"].end is None
    assert results["SGD"].settings["lr"] == 0.01, "rates that were not chosen are left out"
    assert [row["update"] for row in results["KFC"].rows] == list(range(0, 360, 40))
    assert results["SGD, BN"].last["averaged_train_loss"] is None
    assert len(paper_curves.read_curves("figure4")) == 4
    assert paper_curves.read_curves("figure5") == []


def test_a_figure_has_a_line_for_every_split_measure_and_axis(results):
    [drawing] = [each for each in paper_figures.DRAWINGS if each.comparison == "figure4"]
    root = ElementTree.fromstring(
        paper_figures.figure(drawing, [results["KFC"], results["SGD"], results["SGD, BN"]])
    )
    lines = root.findall("{*}polyline")
    # The diverged run has one point with a finite loss, which is no line.
    assert len(lines) == 2 * 2 * 2 * 3
    texts = [each.text for each in root.findall("{*}text")]
    assert {"KFC, lr 0.003", "SGD, lr 0.01", "epochs", "loss"} <= set(texts)


def goal(value, count="update"):
    measure = paper_curves.TRAIN
    return paper_figures.Goal(measure, value, count)


def first_update(errors, value):
    """Return the update of the first of these evaluations that is at most a value."""
    return 40 * next(index for index, error in enumerate(errors) if error <= value)


def test_a_claim_says_what_both_needed_or_how_far_they_got(results):
    errors = {name: [row[paper_curves.TRAIN] for row in results[name].rows] for name in results}
    value = errors["SGD"][3]
    ours, theirs = (first_update(errors[name], value) for name in ("KFC", "SGD"))
    reached = paper_figures.reached(results, "KFC", "SGD", goal(value))
    assert reached == [f"{ours} updates", f"{theirs} updates", f"{theirs / ours:.2g}x"]

    best = min(errors["SGD"])
    hard = paper_figures.reached(results, "KFC", "SGD", goal(best - 1))
    ours = first_update(errors["KFC"], best - 1)
    far = f"not in 320 updates ({best:.3g}%)"
    assert hard == [f"{ours} updates", far, f"> {320 / ours:.2g}x"]

    late = paper_figures.reached(results, "KFC", "SGD", goal(min(errors["KFC"])))
    assert late[1:] == [far, "open"], "SGD was not trained for longer"
    assert paper_figures.reached(results, "KFC", "Adam", goal(30.0))[1:] == ["not run", ""]


def test_goals_are_listed_for_every_method(results):
    [drawing] = [each for each in paper_figures.DRAWINGS if each.comparison == "figure4"]
    lines = paper_figures.results_of(drawing).splitlines()
    assert lines[0].endswith("](pictures/paper-figure4.svg)")
    assert lines[2] == "| to reach | SGD | KFC | SGD, BN |"
    errors = [row[paper_curves.TRAIN] for row in results["KFC"].rows]
    update = first_update(errors, 20)
    [line] = [line for line in lines if line.startswith("| 20% training error |")]
    assert f"| {0.9 * update * 0.5:,.0f} s, {update} updates |" in line
    assert line.endswith("| - |")
    assert lines[-1] == "| updates so far | 320 | 320 | 80 |"


def test_tables_replace_those_between_the_markers():
    empty = "".join(
        f"{name}\n<!-- {name}: begin -->old<!-- {name}: end -->\n"
        for name in paper_figures.tables()
    )
    page = paper_figures.with_tables(empty)
    assert "old" not in page
    assert all(table in page for table in paper_figures.tables().values())
    with pytest.raises(ValueError, match="must contain <!-- headline: begin -->"):
        paper_figures.with_tables("nothing")


# Axes


def test_axes_place_values_and_choose_round_ticks():
    linear = Axis(0, 60, 100, 400)
    assert [linear.place(value) for value in (0, 30, 60, 90)] == [100, 250, 400, 400]
    assert linear.ticks() == [0, 10, 20, 30, 40, 50, 60]
    assert Axis(0, 7, 0, 1).ticks() == [0, 2, 4, 6]
    log = Axis(10, 1000, 0, 200, log=True)
    assert [log.place(value) for value in (1, 10, 100, 1000)] == [0, 0, 100, 200]
    assert log.ticks() == [10, 30, 100, 300, 1000]
    assert Axis(10, 100, 0, 200, log=True).ticks() == [10, 20, 50, 100]
