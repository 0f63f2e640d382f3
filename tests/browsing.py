"""What every page must hold in a browser."""

import json


def check_console_and_network(browser, address: str) -> None:  # type: ignore[no-untyped-def]
    """No error on the console, and no request to anything but the page's own server."""
    severe = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not severe, severe
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert any(url.startswith(address) for url in urls)
    elsewhere = {url for url in urls if url.startswith(("http", "ws")) and not url.startswith(address)}
    assert not elsewhere, elsewhere
