"""A page in a real browser."""

import os
import shutil
from contextlib import contextmanager

import pytest

NASTY = "<img src=x onerror=alert(1)>"
WIDTHS = (1400, 400)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def running_browser():
    """Skips the test if there is none, unless one is required."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        message = f"no browser: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("KFC_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        yield running
        running.close()


@contextmanager
def opened(browser, path, width):
    """The page at that width; in the end nothing may have gone wrong, or been fetched."""
    faults = []
    address = path.as_uri()
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: _note_request(request.url, address, faults))
    page.goto(address)
    yield page
    page.close()
    assert faults == []


def _note_request(url, address, faults):
    if url != address and not url.startswith("data:"):
        faults.append(f"request of {url}")


def figure_ids(page):
    return set(page.eval_on_selector_all(".plot", "plots => plots.map(plot => plot.id)"))


def page_width(page):
    return page.evaluate("document.documentElement.scrollWidth")
