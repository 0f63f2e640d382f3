"""What every page must hold in a browser."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ABORTED = "signal is aborted", "Connection errored out"
"""What gradio's client prints when its page is left while an event is still streamed to it."""


def until(browser, condition: Callable) -> object:  # type: ignore[no-untyped-def,type-arg]
    """Wait for a condition on a page that replaces its elements while they are read."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60, 0.1, (NoSuchElementException, StaleElementReferenceException)).until(condition)


def severe(browser) -> list[str]:  # type: ignore[no-untyped-def]
    """The errors that the console got since the last look."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def leaving(browser) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """Around a step to another page, to its end: the page had no error, and nothing but its aborted streams is printed by leaving it."""
    assert not (errors := severe(browser)), errors
    yield
    assert not (errors := [e for e in severe(browser) if not any(words in e for words in ABORTED)]), errors


def check_console_and_network(browser, address: str) -> None:  # type: ignore[no-untyped-def]
    """No error on the console, and no request to anything but the page's own server."""
    assert not (errors := severe(browser)), errors
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert any(url.startswith(address) for url in urls)
    elsewhere = {url for url in urls if url.startswith(("http", "ws")) and not url.startswith(address)}
    assert not elsewhere, elsewhere
