"""A page in a real browser."""

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
    """One tab of a browser, for page after page: what a new tab loads first takes seconds more."""

    def __init__(self, browser):
        self.page = browser.new_page()
        self.shows = None  # path and width of what no test has changed


@contextmanager
def running_browser():
    """A tab. Skips the test if there is no browser, unless one is required."""
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
    """The page at that width; in the end nothing may have gone wrong, or been fetched.

    Args:
        unchanged: the test leaves the page as it is, for the next one.
    """
    faults = []
    address = path.as_uri()
    listeners = {
        "console": lambda message: faults.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: faults.append(str(error)),
        "dialog": lambda dialog: faults.append(dialog.message),
        "request": lambda request: _note_request(request.url, address, faults),
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


def _note_request(url, address, faults):
    if url != address and not url.startswith("data:"):
        faults.append(f"request of {url}")


def figure_ids(page):
    return set(page.eval_on_selector_all(".plot", "plots => plots.map(plot => plot.id)"))


def page_width(page):
    return page.evaluate("document.documentElement.scrollWidth")
