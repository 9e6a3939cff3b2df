"""Tests of the page of `kfc compare suite` in a real browser, in a wide and a narrow window."""

import math
from dataclasses import replace

import pytest

from browsing import WIDTHS, figure_ids, opened, page_width, running_browser, undrawn
from kfc.lab.report.suite import write_suite_page
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.results import Results
from kfc.lab.suite.search import DEFAULTS, settings_of
from kfc.lab.suite.store import RULESETS, BenchmarkSettings, Entry, Record
from kfc.lab.suite.trial import Outcome
from kfc.lab.suite.workloads import WORKLOADS


@pytest.fixture(scope="module")
def tab():
    with running_browser() as tab:
        yield tab


def made_up_results(workloads=tuple(WORKLOADS), methods=tuple(METHODS)):
    """Results of a benchmark in which every third run misses its target and one run diverges."""
    records = []
    for row, workload in enumerate(workloads):
        for column, method in enumerate(methods):
            for ruleset in RULESETS:
                seconds = 10.0 + 7 * ((row * 5 + column * 3 + len(ruleset)) % 11)
                end = "target" if (row + column) % 3 else "limit"
                end = "diverged" if row == column == 2 else end
                target = WORKLOADS[workload].target
                curve = [(seconds * at / 10, at, target * 10 / at) for at in range(1, 11)]
                outcome = Outcome(curve, seconds, 10, 2.0, 2.0 + column / 10, end, "")
                setting = DEFAULTS if ruleset == "untuned" else settings_of(METHODS[method], 2)[1]
                records.append(Record(Entry(workload, ruleset, method, 0, 0, setting), outcome))
    settings = BenchmarkSettings(
        workloads=workloads,
        methods=methods,
        rulesets=RULESETS,
        seeds=1,
        trials=1,
        hours=3.0,
        quick=False,
        threads=2,
        limit_factor=1.0,
        digests={},
        environment={"torch": "2"},
    )
    return Results(settings, [WORKLOADS[name] for name in workloads], 9000.0, True, records)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_drawn_and_nothing_overflows(tab, tmp_path, width):
    results = made_up_results()
    write_suite_page(tmp_path / "page.html", results)
    with opened(tab, tmp_path / "page.html", width) as page:
        curves = {f"curve-{ruleset}-{name}" for ruleset in RULESETS for name in WORKLOADS}
        assert figure_ids(page) == curves | {"profile-untuned", "profile-tuned"}
        assert undrawn(page) == []
        assert page_width(page) <= width
        assert "NAdamW diverged on resnet" in page.locator("#losses").text_content()


def test_a_benchmark_without_a_complete_round(tab, tmp_path):
    results = replace(made_up_results(), records=[], complete=False)
    assert all(math.isfinite(each.seconds) for each in results.workloads)
    write_suite_page(tmp_path / "page.html", results)
    with opened(tab, tmp_path / "page.html", 400) as page:
        assert figure_ids(page) == set()
        assert "6% training error" in page.locator("#rules").text_content()
