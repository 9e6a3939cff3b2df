"""Tests of the page of `kfc inspect` in a real browser, in a wide and a narrow window."""

import pytest
from torch import nn

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
from inspected_networks import inspect_small, network_of, small_network
from kfc.lab.report.inspection import write_inspection_page

KINDS = ("derivatives", "activations")


@pytest.fixture(scope="module")
def tab():
    with running_browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def inspection_page(tmp_path_factory):
    """A page about two networks. The names of one of them and of a layer are an element."""
    inspections = [
        inspect_small(
            network_of(small_network(pooling, NASTY), label),
            layers=(NASTY, "fc"),
            approximations=("iad", "kfc"),
        )
        for pooling, label in (("max", NASTY), ("average", "average"))
    ]
    path = tmp_path_factory.mktemp("inspection") / "page.html"
    write_inspection_page(path, inspections, f"Inspection {NASTY}")
    return path


@pytest.fixture(scope="module", params=WIDTHS)
def width(request):
    return request.param


@pytest.fixture
def page(tab, inspection_page, width):
    """The page, for tests that do not change it."""
    with opened(tab, inspection_page, width, unchanged=True) as page:
        yield page


def sizes(page, selector=".plot"):
    """Return width and height of each figure's drawing, and of the element that holds it."""
    return page.eval_on_selector_all(
        selector,
        """plots => plots.map((plot) => {
            const drawing = plot.querySelector(".main-svg");
            return [drawing.clientWidth, drawing.clientHeight, plot.clientWidth, plot.clientHeight];
        })""",
    )


def test_every_figure_is_drawn_and_nothing_overflows(page):
    pictures = {
        f"{kind}-0-{network}-{what}"
        for kind in KINDS
        for network in range(2)
        for what in ("offsets", "maps")
        # The first layer has one input map, whose correlation with itself is always 1.
        if (kind, what) != ("activations", "maps")
    }
    spectra = {f"spectrum-{layer}-{network}" for layer in range(2) for network in range(2)}
    numbers = {f"{kind}-{n}" for kind in ("errors", "decreases", "traces") for n in range(2)}
    assert figure_ids(page) == pictures | spectra | numbers
    assert undrawn(page) == []
    assert page_width(page) <= page.viewport_size["width"]
    for width, height, room, space in sizes(page):
        assert (width, height) == (room, space)
        assert width <= page.viewport_size["width"]


def test_heat_maps_are_square_and_share_a_scale(page):
    assert all(width == height for width, height, *_ in sizes(page, ".square"))
    ranges = page.eval_on_selector_all(
        ".square", "plots => plots.map(({layout: {coloraxis: c}}) => [c.cmin, c.cmax])"
    )
    assert ranges == [[0, 1]] * 6
    boxes = page.eval_on_selector_all(
        "#derivatives-0-0-offsets .heatmaplayer image",
        "images => images.map((i) => [i.getBoundingClientRect().width, "
        "i.getBoundingClientRect().height])",
    )
    assert len(boxes) == 4
    for width, height in boxes:
        assert abs(width - height) < 3
        assert width > 80


def test_networks_are_side_by_side_in_a_wide_window(page):
    first, second = (
        page.locator(f"#derivatives-0-{network}-offsets").bounding_box() for network in range(2)
    )
    if page.viewport_size["width"] == max(WIDTHS):
        assert first["y"] == second["y"]
        assert first["x"] + first["width"] <= second["x"]
    else:
        assert first["x"] == second["x"]


def test_hovering_shows_the_correlation(page):
    plot = page.locator("#derivatives-0-0-offsets")
    plot.scroll_into_view_if_needed()
    box = plot.locator(".heatmaplayer image").last.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    label = plot.locator(".hovertext")
    label.wait_for(timeout=3000)
    assert "1.000 at x offset 0, y offset 0" in label.text_content()
    assert "mean of 4 maps" in label.text_content()


def test_names_are_shown_as_text(page):
    assert page.locator("img").count() == 0
    assert page.locator("h1").text_content() == f"Inspection {NASTY}"
    for section in ("assumptions", "derivatives", "spectra", "approximations", "networks"):
        assert NASTY in page.locator(f"#{section}").text_content()


def test_figures_have_names_for_screen_readers(page):
    plots = page.locator(".plot")
    for index in range(plots.count()):
        assert plots.nth(index).get_attribute("role") == "img"
        assert plots.nth(index).get_attribute("aria-label")
    assert page.locator("figcaption").count() == plots.count()


def test_printing_and_resizing(tab, inspection_page):
    with opened(tab, inspection_page, max(WIDTHS)) as page:
        before = sizes(page)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert max(width for width, *_ in sizes(page)) <= 680
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        wait_until(page, lambda: sizes(page) == before)
        page.set_viewport_size({"width": min(WIDTHS), "height": 900})
        wait_until(page, lambda: all([w, h] == place for w, h, *place in sizes(page)))
        assert page_width(page) <= min(WIDTHS)


def test_a_layer_without_derivatives(tab, tmp_path):
    """Correlations and errors that are not finite are left out; the rest is drawn."""
    model = small_network()
    model.conv2.weight.data.zero_()
    found = inspect_small(network_of(model), approximations=("kfc",))
    write_inspection_page(tmp_path / "page.html", [found], "Dead")
    with opened(tab, tmp_path / "page.html", min(WIDTHS)) as page:
        assert undrawn(page) == ["derivatives-0-0-offsets"]
        assert page_width(page) <= min(WIDTHS)


def test_signals_volumes_and_linear_layers(tab, tmp_path):
    """Conv1d is drawn as lines, Conv3d as a slice, with three networks side by side."""
    models = {
        (1, 8): nn.Sequential(nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(18, 4)),
        (1, 4, 4, 4): nn.Sequential(nn.Conv3d(1, 3, 3), nn.Flatten(), nn.Linear(24, 4)),
        (8,): nn.Sequential(nn.Linear(8, 4)),
    }
    found = [
        inspect_small(
            network_of(model, f"of {size}", size=size), layers=("0",), approximations=("kfc",)
        )
        for size, model in models.items()
    ]
    write_inspection_page(tmp_path / "page.html", found, "Small")
    with opened(tab, tmp_path / "page.html", min(WIDTHS)) as page:
        assert undrawn(page) == []
        assert page_width(page) <= min(WIDTHS)
        kinds = page.eval_on_selector_all(
            "#derivatives .plot", "plots => plots.map((plot) => plot.data[0].type)"
        )
        assert kinds == ["scatter", "heatmap", "heatmap", "heatmap"]
        assert "all dimensions but the last two" in page.locator("#derivatives").inner_text()
