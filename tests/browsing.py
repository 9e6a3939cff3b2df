"""Open pages in a real browser."""

import os
import shutil
from contextlib import contextmanager

import pytest

NASTY = "<img src=x onerror=alert(1)>"
WIDTHS = (400, 1400)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


class Tab:
    """A browser tab that tests share, because the first page of a new tab takes seconds to load.

    Attributes:
        shows: path and width of a page that no test has changed, or ``None``.
    """

    def __init__(self, browser):
        self.page = browser.new_page()
        self.shows = None


@contextmanager
def running_browser():
    """Start a browser and yield a tab.

    Without a browser, skip the test, or fail it if KFC_REQUIRE_BROWSER is 1.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        message = f"no browser: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("KFC_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield Tab(running)
        running.close()


@contextmanager
def opened(tab, path, width, unchanged=False):
    """Open a page in a window of the given width.

    On exit, assert that the page reported no error, opened no dialog and requested nothing.

    Args:
        unchanged: whether the test does not change the page, so that the next one may reuse it.
    """
    faults = []
    address = path.as_uri()
    listeners = {
        "console": lambda message: faults.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: faults.append(str(error)),
        "dialog": lambda dialog: faults.append(dialog.message),
        "request": lambda request: _record_request(request.url, address, faults),
    }
    page = tab.page
    for event, listener in listeners.items():
        page.on(event, listener)
    if tab.shows != (path, width):
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(address)
    tab.shows = (path, width) if unchanged else None
    try:
        yield page
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert faults == []


def _record_request(url, address, faults):
    if url != address and not url.startswith("data:"):
        faults.append(f"requested {url}")


def figure_ids(page):
    """Return the ids of all figures."""
    return set(page.eval_on_selector_all(".plot", "plots => plots.map(plot => plot.id)"))


def undrawn(page):
    """Return the ids of figures without a visible image, line, marker or bar."""
    return page.evaluate("""() => [...document.querySelectorAll(".plot")].filter((plot) => {
        const marks = plot.querySelectorAll(".heatmaplayer image, .trace path");
        return ![...marks].some((mark) => mark.getBoundingClientRect().width > 1);
    }).map((plot) => plot.id)""")


def page_width(page):
    """Return the width of the content, which exceeds that of the window if something overflows."""
    return page.evaluate("document.documentElement.scrollWidth")


def wait_until(page, condition):
    """Wait up to five seconds, because plotly resizes figures one after the other."""
    for _ in range(50):
        if condition():
            return
        page.wait_for_timeout(100)
    assert condition()
