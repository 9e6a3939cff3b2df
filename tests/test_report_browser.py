"""Tests of the page about runs in a real browser, in a wide and a narrow window."""

import re

import pytest

from browsing import (
    NASTY,
    WIDTHS,
    figure_ids,
    opened,
    page_width,
    running_browser,
    undrawn,
    wait_until,
)
from kfc.lab.report.page import write_page
from report_runs import make_run

CURVES = {"curve-train_loss", "curve-test_loss", "curve-train_error", "curve-test_error"}
INSIDE_KFC = {
    *("fisher-norm", "clip-factor"),
    *("layers-pi", "layers-activation_trace", "layers-derivative_trace", "layers-block_trace"),
}
INSIDE_KFAC = {
    *("adaptation-lr", "adaptation-momentum", "adaptation-model_damping"),
    *("adaptation-factor_damping", "adaptation-reduction_ratio", "adaptation-changes"),
}


@pytest.fixture(scope="module")
def tab():
    with running_browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Three runs of KFC, one of them diverged, SGD, KFAC, and a run whose name is an element."""
    folder = tmp_path_factory.mktemp("comparison")
    records = [
        make_run(folder / "kfc", "KFC", "kfc", evaluations=30),
        make_run(folder / "slow", "KFC", "kfc", lr=0.0003, pace=0.005, end="not chosen"),
        make_run(folder / "lost", "KFC", "kfc", lr=1.0, evaluations=3, end="diverged"),
        make_run(folder / "sgd", "SGD", "sgd", evaluations=40),
        make_run(folder / "kfac", "KFAC", "kfac", evaluations=20),
        make_run(folder / "nasty", NASTY, "kfc", inverse="eigen", pace=0.01),
    ]
    page = folder / "report.html"
    write_page(page, records, title=f"Report {NASTY}", introduction=NASTY)
    return page


@pytest.fixture(scope="module", params=WIDTHS)
def width(request):
    return request.param


@pytest.fixture
def page(tab, comparison, width):
    """The page, for tests that do not change it."""
    with opened(tab, comparison, width, unchanged=True) as page:
        yield page


@pytest.fixture
def wide_page(tab, comparison):
    """The page in a wide window, for tests that change it."""
    with opened(tab, comparison, max(WIDTHS)) as page:
        yield page


def axis_title(page, figure="curve-train_loss"):
    return page.locator(f"#{figure} .xtitle").text_content()


def test_every_figure_is_drawn_and_nothing_overflows(page):
    assert figure_ids(page) == {*CURVES, *INSIDE_KFC, *INSIDE_KFAC, "sensitivity", "costs"}
    assert undrawn(page) == []
    assert page_width(page) <= page.viewport_size["width"]
    wide = page.viewport_size["width"] > 800
    assert page.locator("#costs .modebar-btn").count() == (4 if wide else 0)


def test_tables_are_as_wide_as_the_page(page):
    content = page.eval_on_selector("main", "main => main.clientWidth")
    widths = page.eval_on_selector_all("section table", "all => all.map((one) => one.clientWidth)")
    assert min(width for width in widths if width > 0) >= content - 1


def test_ticks_of_logarithmic_axes_are_whole_numbers(page):
    """Of 1, 2 or 5 times a power of ten, or of powers of ten alone."""
    for figure in CURVES:
        texts = page.locator(f"#{figure} .ytick text").all_text_contents()
        texts = [text.replace("\u200b", "") for text in texts]
        assert len(texts) >= 2
        for text in texts:
            assert re.fullmatch(r"(0\.0*[125]|[125]0*|10[−-]?\d+)", text), (figure, texts)


def test_hovering_shows_the_name_of_the_run(page):
    plot = page.locator("#curve-test_error")
    plot.scroll_into_view_if_needed()
    # The last trace, on top of the others, is that of the run whose name is an element.
    box = plot.locator(".scatterlayer .trace").last.locator(".point").last.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    label = plot.locator(".hovertext")
    label.wait_for(timeout=3000)
    assert NASTY in label.text_content()
    assert "seconds of training" in label.text_content()


def test_names_are_shown_as_text(page):
    assert page.locator("img").count() == 0
    assert page.locator("h1").text_content() == f"Report {NASTY}"
    assert NASTY in page.locator("#summary").text_content()
    assert page.locator("#costs .ytick").last.text_content() == "<img src=x on…"


def test_an_error_of_zero_is_drawn_on_a_logarithmic_scale(page):
    drawn, true = page.eval_on_selector(
        "#curve-train_error",
        """plot => { const kfc = plot.data.find((trace) => trace.name.startsWith("KFC"));
                     return [Math.min(...kfc.y), Math.min(...kfc.customdata)]; }""",
    )
    assert true == 0 < drawn


def test_controls_change_the_curves(wide_page):
    page = wide_page
    traces = page.locator("#curve-train_loss .scatterlayer .trace")
    assert (axis_title(page), traces.count()) == ("seconds of training", 4)
    page.get_by_label("epochs", exact=True).check()
    assert axis_title(page) == "epochs"
    page.keyboard.press("ArrowRight")
    assert axis_title(page) == "updates"
    page.get_by_label("both", exact=True).check()
    assert traces.count() == 8
    page.get_by_label("averaged", exact=True).check()
    page.get_by_label("all learning rates").check()
    assert traces.count() == 6
    page.get_by_label("KFC", exact=True).uncheck()
    assert traces.count() == 3
    page.get_by_label("linear", exact=True).first.check()
    kind = "plot => plot._fullLayout.yaxis.type"
    assert page.eval_on_selector("#curve-train_loss", kind) == "linear"


def test_choosing_the_run_of_the_layers_and_printing(wide_page):
    updates = "plot => Math.max(...plot.data[0].x)"
    assert wide_page.eval_on_selector("#layers-pi", updates) == 29 * 40
    wide_page.get_by_label("Run", exact=True).select_option(label=NASTY)
    assert wide_page.eval_on_selector("#layers-pi", updates) == 11 * 40

    widths = 'plots => plots.map((plot) => plot.querySelector(".main-svg").clientWidth)'
    before = wide_page.eval_on_selector_all(".plot", widths)
    wide_page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(wide_page.eval_on_selector_all(".plot", widths)) <= 680
    wide_page.evaluate("dispatchEvent(new Event('afterprint'))")
    wait_until(wide_page, lambda: wide_page.eval_on_selector_all(".plot", widths) == before)


def test_a_run_with_a_single_evaluation(tab, tmp_path):
    record = make_run(tmp_path / "run", evaluations=1, end=None)
    write_page(tmp_path / "page.html", [record], title="Begun")
    with opened(tab, tmp_path / "page.html", 400) as page:
        assert figure_ids(page) == CURVES | INSIDE_KFC
        assert undrawn(page) == []
        assert page_width(page) <= 400


def test_twenty_runs_with_long_names_and_without_kfc(tab, tmp_path):
    records = [
        make_run(tmp_path / str(index), f"{index} {'long' * 12} name", "sgd", evaluations=index)
        for index in range(20)
    ]
    write_page(tmp_path / "page.html", records, title="Many")
    with opened(tab, tmp_path / "page.html", 400) as page:
        assert figure_ids(page) == {*CURVES, "costs"}
        assert undrawn(page) == []
        assert page_width(page) <= 400


def test_only_a_diverged_run(tab, tmp_path):
    record = make_run(tmp_path / "run", "SGD", "sgd", evaluations=4, end="diverged")
    write_page(tmp_path / "page.html", [record], title="Lost")
    with opened(tab, tmp_path / "page.html", 1400) as page:
        assert "SGD diverged at update 120" in page.locator("#summary").text_content()
        assert undrawn(page) == []
