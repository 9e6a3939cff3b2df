"""Tables, numbers and the page's text; the page in a browser is another file's matter."""

import json
import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from kfc.cli.report import goals_of
from kfc.report.costs import cost_by_part, cost_rows
from kfc.report.curves import curve_data
from kfc.report.diagnostics import layer_figures
from kfc.report.figures import plain, thinned
from kfc.report.formats import distinct_labels, number, ratio
from kfc.report.page import write_page
from kfc.report.sections import all_sections
from kfc.report.sensitivity import grid_points, sensitivity_figure
from kfc.report.styles import LINE_COLOURS, line_style
from kfc.report.summary import Goals, best_runs, default_goals, goal_rows, summary_rows
from kfc.report.table import compared, html_table, settings_column
from report_runs import make_run

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def kfc_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "kfc", "KFC", "kfc")


@pytest.fixture(scope="module")
def sgd_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "sgd", "SGD", "sgd")


def with_errors(record, errors, key="averaged_train_error"):
    """The record with other errors, one evaluation for each."""
    rows = [{**row, key: error} for row, error in zip(record.evaluations, errors, strict=False)]
    return replace(record, evaluations=rows)


def with_last_loss(record, loss, lr=None, reason="epochs"):
    rows = [*record.evaluations[:-1], {**record.evaluations[-1], "averaged_train_loss": loss}]
    config = record.config if lr is None else replace(record.config, lr=lr)
    return replace(record, evaluations=rows, config=config, end={**record.end, "reason": reason})


def cells(rows, label):
    return next(row[1:] for row in rows if row[0].startswith(label))


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.012345, "0.0123"), (3.0, "3"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_that_matter(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.527, "0.53x"), (1, "1.0x"), (7.46, "7.5x"), (9.96, "10x"), (1e3, "1,000x")],
)
def test_ratios(value, text):
    assert ratio(value) == text


# Which runs


def test_best_run_has_the_lowest_loss(kfc_run, sgd_run):
    grid = [with_last_loss(kfc_run, loss) for loss in (0.5, 0.1, 0.3)]
    assert best_runs([grid[0], sgd_run, *grid[1:]]) == [grid[1], sgd_run]
    assert best_runs([]) == []


def test_runs_that_failed_or_were_not_chosen_are_a_last_resort(kfc_run):
    not_chosen = with_last_loss(kfc_run, 0.1, reason="not chosen")
    diverged = with_last_loss(kfc_run, 0.2, reason="diverged")
    without_loss = with_last_loss(kfc_run, None)
    sound = with_last_loss(kfc_run, 0.9)
    assert best_runs([not_chosen, diverged, without_loss, sound]) == [sound]
    assert best_runs([not_chosen, diverged, without_loss]) == [without_loss]
    assert best_runs([not_chosen, diverged]) == [diverged]
    assert best_runs([not_chosen]) == [not_chosen]


# The summary


def test_summary_has_a_column_for_each_run(kfc_run, sgd_run):
    rows = summary_rows([kfc_run, sgd_run])
    assert rows[0] == ("run", "KFC", "SGD")
    assert cells(rows, "learning rate") == ("0.003", "0.01")
    assert cells(rows, "epochs") == ("11", "11")
    assert cells(rows, "updates") == ("440", "440")
    assert cells(rows, "seconds per epoch (x SGD's)") == ("20 (5.0x)", "4")
    last = sgd_run.evaluations[-1]
    assert cells(rows, "train loss")[1] == f"{last['averaged_train_loss']:.3g}"
    assert cells(rows, "test error")[1] == f"{last['averaged_test_error']:.2f}%"
    assert cells(rows, "ended") == ("all epochs done", "all epochs done")


def test_summary_of_runs_that_have_not_come_far(tmp_path, sgd_run):
    fresh = make_run(tmp_path / "fresh", evaluations=0, end=None)
    lost = make_run(tmp_path / "lost", evaluations=3, end="diverged")
    rows = summary_rows([sgd_run, fresh, lost])
    assert cells(rows, "train loss")[1:] == ("–", "–")
    assert cells(rows, "ended")[1:] == ("unfinished", "diverged")


def test_baseline_is_sgd_or_the_one_named(kfc_run, sgd_run):
    assert cells(summary_rows([kfc_run, sgd_run], "KFC"), "seconds per epoch (x KFC's)")[1]
    with pytest.raises(ValueError, match="no run is named 'Adam'; there are KFC, SGD"):
        summary_rows([kfc_run, sgd_run], "Adam")


def test_a_run_without_a_learning_rate_chose_its_own(tmp_path, sgd_run):
    kfac = make_run(tmp_path / "kfac", "KFAC", "kfac")
    assert cells(summary_rows([kfac, sgd_run]), "learning rate") == ("its own", "0.01")


# Goals


def test_a_loss_may_be_a_goal(kfc_run, sgd_run):
    goals = Goals(train_losses=(0.5,))
    rows = goal_rows([kfc_run, sgd_run], goals)
    assert goals
    assert not Goals()
    assert rows[1][0] == "training loss 0.5"
    losses = [row["averaged_train_loss"] for row in kfc_run.evaluations]
    first = next(i for i, loss in enumerate(losses) if loss <= 0.5)
    assert rows[3][1].startswith(f"{first} ")


def test_goals_count_until_the_error_is_first_reached(kfc_run, sgd_run):
    fast = with_errors(kfc_run, [90, None, 6, 7, 5])
    slow = with_errors(sgd_run, [90, 50, 40, 30, 20, 10, 9, 8, 5.9])
    rows = goal_rows([fast, slow], Goals(train_errors=(6,)))
    assert rows == [
        ("to reach", "KFC", "SGD"),
        ("6% training error", "", ""),
        ("seconds", "40 (0.8x)", "32"),
        ("epochs", "2 (4.0x)", "8"),
        ("updates", "80 (4.0x)", "320"),
    ]


def test_goals_that_are_missed(kfc_run, sgd_run):
    fast = with_errors(kfc_run, [90, 5], "averaged_test_error")
    slow = with_errors(sgd_run, [90, 80, 70], "averaged_test_error")
    rows = goal_rows([fast, slow], Goals(test_errors=(5,)))
    assert rows[1][0] == "5% test error"
    assert cells(rows, "updates") == ("40 (> 2.0x)", "not reached")
    untrained = with_errors(sgd_run, [90], "averaged_test_error")
    assert cells(goal_rows([fast, untrained], Goals((), (5,))), "updates")[0] == "40"


def test_default_goals_are_round_and_reached(kfc_run, sgd_run):
    fast = with_errors(kfc_run, [90, 20, 0.37])
    slow = with_errors(sgd_run, [90, 50, 7])
    assert default_goals([fast, slow]).train_errors == (8, 0.5)
    assert len(default_goals([fast, slow]).test_errors) == 1
    assert default_goals([with_errors(fast, [90]), with_errors(slow, [None, None])]) == Goals()


def test_default_goals_are_those_of_the_runs_shown(kfc_run, sgd_run):
    """Not of learning rates that were tried and given up."""
    chosen = with_last_loss(with_errors(kfc_run, [90, 20, 7]), 0.1)
    given_up = with_last_loss(with_errors(kfc_run, [90, 80, 0.37]), 0.5, reason="not chosen")
    assert goals_of(None, [given_up, chosen]).train_errors == (8,)
    assert goals_of(None, [given_up, chosen]) == default_goals([chosen])


# Learning rates


def test_learning_rates_are_compared_after_equal_seconds(tmp_path):
    short = make_run(tmp_path / "short", lr=0.1, evaluations=4)
    long = make_run(tmp_path / "long", lr=0.01, evaluations=9)
    lost = make_run(tmp_path / "lost", lr=1.0, evaluations=2, end="diverged")
    points = grid_points([short, long, lost])
    assert [point.lr for point in points] == [0.01, 0.1, 1.0]
    assert [point.seconds for point in points[:2]] == [60, 60]
    assert points[0].loss == long.evaluations[3]["averaged_train_loss"]
    assert [point.diverged for point in points] == [False, False, True]
    curve, failures = sensitivity_figure([short, long, lost], ["KFC"]).variants[0]
    assert (curve["x"], failures["x"]) == ([0.01, 0.1], [1.0])
    assert sensitivity_figure([short], ["KFC"]) is None


def test_a_loss_of_zero_is_no_failure(kfc_run):
    records = [with_last_loss(kfc_run, loss, lr) for loss, lr in ((0.0, 0.1), (0.02, 1.0))]
    (curve,) = sensitivity_figure(records, ["KFC"]).variants[0]
    assert (curve["x"], curve["y"]) == ([0.1, 1.0], [0.01, 0.02])
    assert [loss for loss, _ in curve["customdata"]] == ["0", "0.02"]
    all_zero = [with_last_loss(kfc_run, 0.0, lr) for lr in (0.1, 1.0)]
    assert sensitivity_figure(all_zero, ["KFC"]).variants[0][0]["y"] == [0.5, 0.5]
    lost = with_last_loss(kfc_run, None, 10.0)
    curve, failures = sensitivity_figure([*records, lost], ["KFC"]).variants[0]
    assert (failures["x"], failures["y"], failures["customdata"]) == (
        [10.0],
        [0.04],
        ["no finite loss"],
    )


def test_runs_without_a_learning_rate_are_left_out(kfc_run):
    adaptive = replace(kfc_run, config=replace(kfc_run.config, lr=None))
    assert sensitivity_figure([adaptive, adaptive], ["KFC"]) is None
    rated = [with_last_loss(kfc_run, 0.1, lr) for lr in (0.1, 1.0)]
    (curve,) = sensitivity_figure([adaptive, *rated], ["KFC"]).variants[0]
    assert curve["x"] == [0.1, 1.0]
    assert distinct_labels([adaptive, adaptive])[0] == "KFC, lr none (1)"


# Costs


def test_costs_weigh_evaluations_by_their_updates(kfc_run):
    rows = [
        {"update": 0, "step_seconds": {}},
        {"update": 10, "step_seconds": {"forward": 0.1}},
        {"update": 40, "step_seconds": {"forward": 0.2, "clip": 0.1}},
    ]
    costs = cost_by_part(replace(kfc_run, evaluations=rows))
    assert costs == pytest.approx({"forward": 175, "clip": 75})
    assert cost_by_part(replace(kfc_run, evaluations=rows[:1])) == {}


def test_costs_add_up(kfc_run, sgd_run):
    rows = cost_rows([kfc_run, sgd_run])
    assert rows[-1] == ("all", "500 ms", "100 ms")
    assert cells(rows, "inverses") == ("150 ms (30%)", "–")


# Settings


def test_settings_that_differ_come_apart(kfc_run, sgd_run):
    different, equal = compared([settings_column(kfc_run), settings_column(sgd_run)])
    assert ("lr", "0.003", "0.01") in different
    assert ("damping", "0.001", "–") in different
    assert ("seed", "0") in equal
    assert compared([settings_column(kfc_run)])[0] == []


def test_labels_tell_runs_of_one_name_apart(kfc_run, sgd_run):
    other = replace(kfc_run, config=replace(kfc_run.config, lr=0.1))
    labels = distinct_labels([kfc_run, other, other, sgd_run])
    assert labels == ["KFC, lr 0.003", "KFC, lr 0.1 (1)", "KFC, lr 0.1 (2)", "SGD"]


# Looks


def test_colours_stand_out_from_white():
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert all(1.05 / (luminance(colour) + 0.05) >= 3 for colour in LINE_COLOURS)


def test_no_two_of_many_lines_look_alike():
    assert len({line_style(index) for index in range(210)}) == 210


def test_every_figure_is_one_that_plotly_knows(tmp_path, kfc_run, sgd_run):
    other = make_run(tmp_path / "other", lr=0.1, evaluations=3, end="diverged")
    records = [kfc_run, sgd_run, other]
    figures = [
        figure
        for section in all_sections(records, best_runs(records), Goals(), None)
        for figure in section.figures
    ]
    assert len(figures) == 12
    for figure in figures:
        for traces in figure.variants or [[]]:
            go.Figure(traces, figure.layout)


def test_groups_of_a_convolution_are_shown_by_their_median(kfc_run):
    figure = layer_figures([kfc_run])[0]
    line = next(trace for trace in figure.variants[0] if trace["name"] == "features.3")
    assert set(line["y"]) == {4.0}


def test_long_series_are_thinned_to_their_end():
    assert thinned(range(5), 5) == range(5)
    kept = thinned(range(10_000), 100)
    assert len(kept) <= 101
    assert (kept[0], kept[-1]) == (0, 9_999)


# The page


def test_names_are_escaped_everywhere(tmp_path, sgd_run):
    record = make_run(tmp_path / "run", NASTY, lr=0.5, evaluations=3)
    other = make_run(tmp_path / "other", NASTY, evaluations=3, end="diverged")
    records = [replace(record, environment={NASTY: NASTY}), other, sgd_run]
    page = tmp_path / "page.html"
    write_page(page, records, title=NASTY, introduction=f"$title {NASTY}</script>")
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text.replace(plotly_source(text), "")
    assert "$title &lt;img" in text
    labels = [run["label"] for run in embedded(text)["curves"]["runs"]]
    assert labels[0] == "&lt;img src=x onerror=alert(1)&gt;, lr 0.5"


def plotly_source(text):
    return max(re.findall(r"<script>(.*?)</script>", text, re.DOTALL), key=len)


def embedded(text):
    return json.loads(re.search(r'id="page-data">(.*?)</script>', text, re.DOTALL).group(1))


def test_labels_are_one_short_line_of_text():
    assert plain("a\n <b>&amp;") == "a &lt;b&gt;&amp;amp;"
    assert plain("x" * 50, longest=10) == "x" * 9 + "…"


def test_tables_mark_what_is_unlike_the_first():
    table = html_table([("", "a", "b", "c"), ("lr", "1", "2", "–")], "", mark_differences=True)
    assert re.findall(r'<td class="other">(.*?)</td>', table) == ["2"]


def test_page_fetches_nothing(tmp_path, kfc_run):
    page = tmp_path / "new" / "folder" / "page.html"
    write_page(page, [kfc_run], title="One run")
    text = page.read_text(encoding="utf-8").replace(plotly_source(page.read_text("utf-8")), "")
    assert not re.search(r"<script[^>]* src|<link[^>]*https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert list(page.parent.iterdir()) == [page]


def test_a_failure_leaves_the_old_page(tmp_path, kfc_run):
    with pytest.raises(ValueError, match="at least one run"):
        write_page(tmp_path / "page.html", [], title="")
    with pytest.raises(OSError, match="folder"):
        write_page(make_folder(tmp_path / "folder"), [kfc_run], title="")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def make_folder(path):
    path.mkdir()
    return path


def test_curves_keep_missing_values_and_their_leaders_look(tmp_path, kfc_run, sgd_run):
    lost = make_run(tmp_path / "lost", lr=1.0, evaluations=3, end="diverged")
    data = curve_data([sgd_run, lost, kfc_run], [sgd_run, kfc_run])["runs"]
    assert [(run["leader"], run["best"]) for run in data] == [(0, True), (1, False), (1, True)]
    assert data[1]["averaged"]["train_loss"][1:] == [None, None]
    assert data[1]["style"] == data[2]["style"] != data[0]["style"]
