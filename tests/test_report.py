"""Tests of the tables, numbers and text of reports; test_report_browser.py tests their display."""

import hashlib
import re
from dataclasses import replace
from itertools import combinations

import plotly.graph_objects as go
import pytest

from kfc.lab.config import make_config
from kfc.lab.data import load
from kfc.lab.report.curves import curves_of, learning_rate_points, sensitivity_section
from kfc.lab.report.diagnostics import (
    clipping_section,
    cost_by_part,
    cost_rows,
    layer_section,
)
from kfc.lab.report.figures import LINE_COLOURS, line_style, plain, thinned
from kfc.lab.report.page import write_page
from kfc.lab.report.rendering import plotly_source as plotly_of_pages
from kfc.lab.report.summary import (
    Goals,
    best_runs,
    default_goals,
    goal_rows,
    summary_rows,
    verdict,
)
from kfc.lab.report.tables import compare_values, distinct_labels, number, ratio
from kfc.lab.runs import read_record
from kfc.lab.training import Trainer
from report_runs import make_run
from written_pages import curve_data_in, figures_in

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def kfc_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "kfc", "KFC", "kfc")


@pytest.fixture(scope="module")
def sgd_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "sgd", "SGD", "sgd")


def with_errors(record, errors, key="averaged_train_error"):
    """Return the record with these errors, one for each evaluation."""
    rows = [{**row, key: error} for row, error in zip(record.evaluations, errors, strict=False)]
    return replace(record, evaluations=rows)


def with_last_loss(record, loss, lr=None, reason="epochs"):
    rows = [*record.evaluations[:-1], {**record.evaluations[-1], "averaged_train_loss": loss}]
    config = record.config if lr is None else record.config.with_options(lr=lr)
    return replace(record, evaluations=rows, config=config, end={**record.end, "reason": reason})


def cells(rows, label):
    return next(row[1:] for row in rows if row[0].startswith(label))


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.012345, "0.0123"), (3.0, "3"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_have_three_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.527, "0.53x"), (1, "1.0x"), (7.46, "7.5x"), (9.96, "10x"), (1e3, "1,000x")],
)
def test_ratios_have_two_significant_digits(value, text):
    assert ratio(value) == text


# Which runs


def test_best_run_has_the_lowest_loss(kfc_run, sgd_run):
    grid = [with_last_loss(kfc_run, loss) for loss in (0.5, 0.1, 0.3)]
    assert best_runs([grid[0], sgd_run, *grid[1:]]) == [grid[1], sgd_run]
    assert best_runs([]) == []


def test_a_failed_or_rejected_run_is_best_only_if_there_is_no_other(kfc_run):
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
    raw = rows[[row[0] for row in rows].index("raw parameters") :]
    assert cells(raw, "train error")[1] == f"{last['train_error']:.2f}%"
    assert cells(rows, "ended") == ("all epochs done", "all epochs done")


def test_summary_of_runs_without_finite_evaluations(tmp_path, sgd_run):
    fresh = make_run(tmp_path / "fresh", evaluations=0, end=None)
    lost = make_run(tmp_path / "lost", evaluations=3, end="diverged")
    rows = summary_rows([sgd_run, fresh, lost])
    assert cells(rows, "train loss")[1:] == ("–", "–")
    assert cells(rows, "ended")[1:] == ("unfinished", "diverged")


def test_baseline_is_sgd_or_the_given_name(kfc_run, sgd_run):
    assert cells(summary_rows([kfc_run, sgd_run], "KFC"), "seconds per epoch (x KFC's)")[1]
    with pytest.raises(ValueError, match="baseline must be one of KFC, SGD; got 'Adam'"):
        summary_rows([kfc_run, sgd_run], "Adam")


def test_a_run_without_a_learning_rate_is_adaptive(tmp_path, sgd_run):
    kfac = make_run(tmp_path / "kfac", "KFAC", "kfac")
    assert cells(summary_rows([kfac, sgd_run]), "learning rate") == ("adaptive", "0.01")


# Goals


def test_a_loss_can_be_a_goal(kfc_run, sgd_run):
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
        ("to reach, averaged", "KFC", "SGD"),
        ("6% training error", "", ""),
        ("seconds", "40 (0.8x)", "32"),
        ("epochs", "2 (4.0x)", "8"),
        ("updates", "80 (4.0x)", "320"),
    ]


def test_goals_that_are_not_reached(kfc_run, sgd_run):
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


def test_default_goals_depend_on_the_best_runs_only(kfc_run, sgd_run):
    """Runs with rejected learning rates do not count."""
    chosen = with_last_loss(with_errors(kfc_run, [90, 20, 7]), 0.1)
    rejected = with_last_loss(with_errors(kfc_run, [90, 80, 0.37]), 0.5, reason="not chosen")
    assert default_goals([rejected, chosen]).train_errors == (8,)
    assert default_goals([rejected, chosen]) == default_goals([chosen])


# Learning rates


def sensitivity_traces(records):
    (figure,) = sensitivity_section(records, ["KFC"])["figures"]
    return figure.variants[0]


def test_learning_rates_are_compared_after_the_same_time(tmp_path):
    short = make_run(tmp_path / "short", lr=0.1, evaluations=4)
    long = make_run(tmp_path / "long", lr=0.01, evaluations=9)
    lost = make_run(tmp_path / "lost", lr=1.0, evaluations=2, end="diverged")
    points = learning_rate_points([short, long, lost])
    assert [point.lr for point in points] == [0.01, 0.1, 1.0]
    assert [point.seconds for point in points[:2]] == [60, 60]
    assert points[0].loss == long.evaluations[3]["averaged_train_loss"]
    assert [point.diverged for point in points] == [False, False, True]
    curve, failures = sensitivity_traces([short, long, lost])
    assert (curve["x"], failures["x"]) == ([0.01, 0.1], [1.0])
    assert sensitivity_section([short], ["KFC"]) is None


def test_a_loss_of_zero_is_not_a_failure(kfc_run):
    records = [with_last_loss(kfc_run, loss, lr) for loss, lr in ((0.0, 0.1), (0.02, 1.0))]
    (curve,) = sensitivity_traces(records)
    assert (curve["x"], curve["y"]) == ([0.1, 1.0], [0.01, 0.02])
    assert [loss for loss, _ in curve["customdata"]] == ["0", "0.02"]
    all_zero = [with_last_loss(kfc_run, 0.0, lr) for lr in (0.1, 1.0)]
    assert sensitivity_traces(all_zero)[0]["y"] == [0.5, 0.5]
    lost = with_last_loss(kfc_run, None, 10.0)
    curve, failures = sensitivity_traces([*records, lost])
    assert (failures["x"], failures["y"], failures["customdata"]) == (
        [10.0],
        [0.04],
        ["no finite loss"],
    )


def test_runs_without_a_learning_rate_are_not_in_the_sensitivity_figure(tmp_path):
    """KFAC adapts its learning rate unless it is given."""
    adaptive, *rated = (
        make_run(tmp_path / str(lr), "KFAC", "kfac", lr=lr) for lr in (None, 0.1, 1.0)
    )
    assert adaptive.config.method.lr is None
    assert sensitivity_section([adaptive, adaptive], ["KFAC"]) is None
    (figure,) = sensitivity_section([adaptive, *rated], ["KFAC"])["figures"]
    (curve,) = figure.variants[0]
    assert curve["x"] == [0.1, 1.0]
    assert distinct_labels([adaptive, adaptive])[0] == "KFAC, lr none (1)"


# Costs


def test_costs_are_weighted_by_the_number_of_updates(kfc_run):
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


def test_values_that_differ_are_separated_from_the_others():
    columns = [{"lr": 0.003, "damping": 1e-3, "batch_size": 8}, {"lr": 0.01, "batch_size": 8}]
    header, different, identical = compare_values(["KFC", "SGD"], columns)
    assert header == ("", "KFC", "SGD")
    assert different == [("lr", "0.003", "0.01"), ("damping", "0.001", "–")]
    assert identical == [("batch size", "8")]
    assert compare_values(["KFC"], columns[:1]).different == []


def test_settings_unlike_those_of_the_first_run_are_marked(tmp_path, kfc_run, sgd_run):
    text = written(tmp_path, [kfc_run, sgd_run])
    assert '<th scope="row">lr</th><td>0.003</td><td class="different">0.01</td></tr>' in text
    assert '<th scope="row">damping</th><td>0.001</td><td>–</td></tr>' in text
    assert '<th scope="row">seed</th><td>0</td></tr>' in text.partition("Identical values")[2]


def written(folder, records, **options):
    """Write a page and return its text."""
    write_page(folder / "page.html", records, **{"title": "Runs", **options})
    return (folder / "page.html").read_text(encoding="utf-8")


def test_labels_of_runs_with_the_same_name_differ(kfc_run, sgd_run):
    other = replace(kfc_run, config=kfc_run.config.with_options(lr=0.1))
    labels = distinct_labels([kfc_run, other, other, sgd_run])
    assert labels == ["KFC, lr 0.003", "KFC, lr 0.1 (1)", "KFC, lr 0.1 (2)", "SGD"]


# Styles and figures


def linear_channels(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def xyz(colour):
    """Return CIE XYZ relative to the white D65."""
    r, g, b = linear_channels(colour)
    return (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )


def lab(colour):
    """Return CIE L*a*b*, in which a distance of about 2 is just noticeable."""
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz(colour))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_line_colours_have_contrast_to_white():
    assert all(1.05 / (xyz(colour)[1] + 0.05) >= 3 for colour in LINE_COLOURS)


def test_line_colours_are_distinct():
    for one, other in combinations(map(lab, LINE_COLOURS), 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 20


def test_many_lines_have_different_styles():
    assert len({line_style(index) for index in range(385)}) == 385


def test_every_figure_is_valid_plotly(tmp_path, kfc_run, sgd_run):
    other = make_run(tmp_path / "other", lr=0.1, evaluations=3, end="diverged")
    kfac = make_run(tmp_path / "kfac", "KFAC", "kfac", evaluations=3)
    figures = figures_in(written(tmp_path, [kfc_run, sgd_run, other, kfac]))
    assert len(figures) == 18
    assert all(figure.title for figure in figures)
    for figure in figures:
        for traces in figure.variants or [[]]:
            go.Figure(traces, figure.layout)


def test_a_grouped_convolution_is_shown_by_the_median_of_its_groups(kfc_run):
    figure = layer_section([kfc_run])["figures"][0]
    line = next(trace for trace in figure.variants[0] if trace["name"] == "features.3")
    assert line["y"] == pytest.approx([4 + update / 1000 for update in line["x"]])


def test_long_series_are_thinned_and_keep_their_ends():
    assert thinned(range(5), 5) == range(5)
    kept = thinned(range(10_000), 100)
    assert len(kept) <= 101
    assert (kept[0], kept[-1]) == (0, 9_999)


# The page


def test_names_are_escaped_everywhere(tmp_path, sgd_run):
    record = make_run(tmp_path / "run", NASTY, lr=0.5, evaluations=3)
    other = make_run(tmp_path / "other", NASTY, evaluations=3, end="diverged")
    records = [replace(record, environment={NASTY: NASTY}), other, sgd_run]
    text = written(
        tmp_path, records, title=NASTY, introduction=f"$title {{{{ title }}}} {NASTY}</script>"
    )
    assert "<img" not in text.replace(plotly_source(text), "")
    assert "$title {{ title }} &lt;img" in text
    labels = [run["label"] for run in curve_data_in(text)["runs"]]
    assert labels[0] == "&lt;img src=x onerror=alert(1)&gt;, lr 0.5"


@pytest.mark.parametrize("name", ["</script><b>", "<!--<script>", "' onclick='x", '" onclick="x'])
def test_names_cannot_end_the_element_or_attribute_they_stand_in(tmp_path, name):
    text = written(tmp_path, [make_run(tmp_path / "run", name, evaluations=3)], title=name)
    assert name not in text.replace(plotly_source(text), "")
    assert curve_data_in(text)["runs"][0]["label"] == plain(name)


def plotly_source(text):
    return max(re.findall(r"<script>(.*?)</script>", text, re.DOTALL), key=len)


def test_labels_are_escaped_and_shortened_to_one_line():
    assert plain("a\n <b>&amp;") == "a &lt;b&gt;&amp;amp;"
    assert plain("x" * 50, max_length=10) == "x" * 9 + "…"


def test_a_page_loads_nothing(tmp_path, kfc_run):
    page = tmp_path / "new" / "folder" / "page.html"
    write_page(page, [kfc_run], title="One run")
    text = page.read_text(encoding="utf-8").replace(plotly_source(page.read_text("utf-8")), "")
    assert not re.search(r"<script[^>]* src|<link[^>]*https?:|url\(|@import", text)
    assert "default-src 'none'" in text
    assert list(page.parent.iterdir()) == [page]


def test_a_failure_leaves_no_file(tmp_path, kfc_run):
    with pytest.raises(ValueError, match="at least one run"):
        write_page(tmp_path / "page.html", [], title="")
    with pytest.raises(OSError, match="folder"):
        write_page(make_folder(tmp_path / "folder"), [kfc_run], title="")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def make_folder(path):
    path.mkdir()
    return path


def test_curves_keep_missing_values_and_share_the_style_of_their_name(tmp_path, kfc_run, sgd_run):
    lost = make_run(tmp_path / "lost", lr=1.0, evaluations=3, end="diverged")
    data = curves_of([sgd_run, lost, kfc_run], [sgd_run, kfc_run])
    assert [(run["group"], run["best"]) for run in data] == [(0, True), (1, False), (1, True)]
    assert data[1]["averaged"]["train_loss"][1:] == [None, None]
    for style in ("line", "marker"):
        assert data[1][style] == data[2][style] != data[0][style]


# The verdict


def test_the_verdict_names_the_fastest_run_and_the_one_with_fewest_updates(kfc_run, sgd_run):
    """SGD evaluates every 4 seconds, KFC every 20; both every 40 updates."""
    kfc = with_errors(kfc_run, [90, 50, 6])
    sgd = with_errors(sgd_run, [90, 60, 50, 40, 30, 6])
    goals = Goals(train_errors=(50, 6, 1), test_errors=(0.001,))
    first = "SGD is the first to reach 6% training error, after 20 s; "
    assert verdict([kfc, sgd], goals) == f"{first}KFC needs the fewest updates, 80 instead of 200."
    behind = "SGD is the first to reach 6% training error, after 20 s (KFC takes 2.0 times as long)"
    assert verdict([kfc, sgd], goals, "KFC").startswith(behind)
    slow = with_errors(sgd_run, [90, 60, 50])
    assert verdict([kfc, slow], Goals((6,))) == (
        "KFC is the first to reach 6% training error, after 40 s (SGD does not in 8 s)."
    )


def test_the_verdict_without_goals(tmp_path, kfc_run, sgd_run):
    last = kfc_run.evaluations[-1]
    errors = f"{last['averaged_train_error']:.2f}% training and "
    errors += f"{last['averaged_test_error']:.2f}% test error (averaged parameters)"
    end = "after 440 updates and 220 s"
    assert verdict([kfc_run], Goals((6,))) == f"KFC has {errors} {end}."
    assert verdict([sgd_run, kfc_run], Goals()) == (
        f"KFC has the lowest training loss, with {errors} {end}."
    )
    lost = make_run(tmp_path / "lost", "Lost", evaluations=3, end="diverged")
    assert verdict([kfc_run, lost], Goals()).endswith("; Lost diverged.")
    assert verdict([lost], Goals()) == "All runs diverged."
    fresh = make_run(tmp_path / "fresh", evaluations=0, end=None)
    assert verdict([fresh], Goals()) == "No run has been evaluated yet."


def test_the_page_begins_with_the_verdict_and_is_small(tmp_path, kfc_run, sgd_run):
    text = written(tmp_path, [kfc_run, sgd_run], title="Two")
    sentence = verdict([kfc_run, sgd_run], default_goals([kfc_run, sgd_run]))
    assert f'</h1>\n<p class="verdict">{sentence}</p>' in text
    assert len(text.encode()) < 2_000_000


# Figures that are left out


def test_figures_that_never_change_are_left_out(tmp_path, kfc_run):
    rows = [{**row, "clip_factor": 1.0} for row in kfc_run.progress]
    unclipped = replace(kfc_run, progress=rows)
    section = clipping_section([unclipped])
    assert [figure.id for figure in section["figures"]] == ["fisher-norm"]
    assert section["constants"] == {"clip-factor": "1"}
    assert "Clip factor: always 1." in written(tmp_path, [unclipped], title="Unclipped")
    section = clipping_section([kfc_run])
    assert [figure.id for figure in section["figures"]] == ["fisher-norm", "clip-factor"]


def test_layers_are_shown_with_their_kind(tmp_path, digits_record):
    assert [text for _, text in layer_section([digits_record])["legend"]] == [
        *("0: Conv2d 1→16", "3: Conv2d 16→32", "7: Linear 128→10")
    ]


@pytest.fixture(scope="module")
def digits_record(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits") / "run"
    config = make_config(data="digits", updates=1, threads=1, estimate_factors=0)
    trainer = Trainer.start(path, config, load("digits"), name="digits")
    trainer.advance()
    trainer.close()
    return read_record(path)


def test_the_plotting_library_is_the_published_file():
    """``make vendor`` fetches it from npm: plotly.js-cartesian-dist-min 4.1.1."""
    source = plotly_of_pages()
    assert source.startswith("/**\n* plotly.js (cartesian - minified) v4.1.1\n")
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert digest == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
