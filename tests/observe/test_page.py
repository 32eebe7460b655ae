"""The status page in a real browser: what is drawn, not only what is written."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import placement
from placement.observe.discovery import Identity
from placement.testing import SimulatedDevice

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

CHUNK = 65536
ON_THE_GPU = (47, 127, 209)

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip(
            "chromium and chromedriver (Debian: chromium, chromium-driver) are not installed"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,1000",
        "--force-device-scale-factor=1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture
def browser(session: Any) -> Any:
    session.get("about:blank")
    session.get_log("browser")  # what an earlier test left
    return session


class ServedManager:
    """A manager with two handles, and its server."""

    def __init__(self, **serve: Any) -> None:
        self.manager = placement.Manager(device=SimulatedDevice(32 * CHUNK, chunk_bytes=CHUNK))
        self.models = {"actor": nn.Linear(256, 512), "ref": nn.Linear(256, 256)}
        for name, model in self.models.items():
            self.manager.register(name, model, role=name)
        self.server = self.manager.serve(**serve)


@pytest.fixture
def worker() -> Iterator[ServedManager]:
    worker = ServedManager()
    yield worker
    worker.server.close()


def until(browser: Any, condition: str, seconds: float = 10.0) -> Any:
    """Wait for a JavaScript expression to be true."""
    deadline = time.monotonic() + seconds
    while not (value := browser.execute_script(f"return {condition}")):
        assert time.monotonic() < deadline, (
            f"{condition}: the page says {browser.find_element('tag name', 'body').text!r}"
        )
        time.sleep(0.05)
    return value


def severe(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def rows_of(browser: Any) -> dict[str, str]:
    rows = "[...document.querySelectorAll('[aria-label=handles] tbody tr')]"
    found: dict[str, str] = browser.execute_script(
        f"return Object.fromEntries({rows}.map(r => [...r.children].map(c => c.innerText)))"
    )
    return found


def colours(browser: Any, box: dict[str, float]) -> list[tuple[int, int, int]]:
    """The pixels in the middle of a box of the page, from left to right."""
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    y = int(box["y"] + box["height"] - 3)  # below the words
    return [image.getpixel((x, y)) for x in range(int(box["x"]), int(box["x"] + box["width"]))]


BOX = (
    "(({x, y, width, height}) => ({x, y, width, "
    "height}))(document.querySelector(%r).getBoundingClientRect())"
)


def test_a_change_of_state_shows_within_two_seconds(browser: Any, worker: ServedManager) -> None:
    browser.get(worker.server.url)
    until(browser, "document.querySelectorAll('[aria-label=handles] tbody tr').length === 2")
    assert rows_of(browser) == {"actor": "off the GPU", "ref": "off the GPU"}
    assert browser.find_element("id", "status").text == "live"
    with worker.manager.phase("log_prob"):
        began = time.monotonic()
        until(
            browser,
            "document.querySelector('[aria-label=handles] tbody').textContent.includes('on the "
            "GPU')",
        )
        # what the page promises, with a browser and everything
        assert time.monotonic() - began < 2.0
        assert rows_of(browser) == {"actor": "on the GPU", "ref": "on the GPU"}
    until(
        browser,
        "!document.querySelector('[aria-label=handles] tbody').textContent.includes('on the GPU')",
    )
    assert severe(browser) == []


def test_the_bars_are_as_wide_as_what_they_stand_for(browser: Any, worker: ServedManager) -> None:
    browser.get(worker.server.url)
    with worker.manager.phase("log_prob"):
        until(browser, "document.querySelectorAll('.bar [data-part]').length === 3")
        inner = browser.execute_script("return document.querySelector('.bar').clientWidth")
        pixels = colours(browser, browser.execute_script("return " + BOX % ".bar"))
        snapshot = worker.manager.snapshot()
        for handle in snapshot.handles:
            width = browser.execute_script("return " + BOX % f".bar [data-part={handle.name}]")[
                "width"
            ]
            assert width == pytest.approx(
                inner * handle.resident_bytes / snapshot.device_total_bytes, abs=1.0
            )
        painted = sum(pixel == ON_THE_GPU for pixel in pixels)
        resident = sum(handle.resident_bytes for handle in snapshot.handles)
        # borders between the parts
        assert painted == pytest.approx(inner * resident / snapshot.device_total_bytes, abs=4.0)
    # others: the poison
    until(browser, "document.querySelectorAll('.bar [data-part]').length === 1")


def test_the_timeline_is_drawn_to_scale(browser: Any, worker: ServedManager) -> None:
    with worker.manager.phase("log_prob"):
        time.sleep(3.0)
    browser.get(worker.server.url)
    until(browser, "document.querySelectorAll('rect[data-handle=actor]').length === 3")
    browser.execute_script(
        "const s = document.getElementById('span'); s.value = '30'; s.dispatchEvent(new "
        "Event('change'))"
    )
    wide = until(
        browser,
        "(() => { const r = [...document.querySelectorAll('rect[data-handle=actor]')].map(n => "
        "n.getBoundingClientRect()); return r.length === 3 && r[1].width > 60 && [r[1].x, r[1].y, "
        "r[1].width, r[1].height]; })()",
    )
    seconds = worker.manager.snapshot().handles[0].state_seconds[placement.State.GPU_RESIDENT]
    pixels_of_a_second = browser.execute_script(
        "return (document.querySelector('svg').getBoundingClientRect().width - 150) / 30"
    )
    assert wide[2] == pytest.approx(seconds * pixels_of_a_second, rel=0.03)
    box = dict(zip(("x", "y", "width", "height"), wide, strict=True))
    if box["y"] + box["height"] < 1000:
        assert colours(browser, box).count(ON_THE_GPU) >= box["width"] - 3


def test_it_survives_the_workers_restart(browser: Any) -> None:
    first = ServedManager()
    port = first.server.port
    browser.get(first.server.url)
    until(browser, "document.getElementById('status').textContent.includes('live')")
    first.server.close()
    until(browser, "document.getElementById('status').textContent.startsWith('no answer since')")
    assert browser.find_element("id", "status").get_attribute("class") == "lost"
    assert rows_of(browser)  # what was known last stays
    second = ServedManager(port=port)
    try:
        with second.manager.phase("log_prob"):
            until(browser, "document.getElementById('status').textContent.includes('live')")
            until(
                browser,
                "document.querySelector('[aria-label=handles] tbody').textContent.includes('on the "
                "GPU')",
            )
    finally:
        second.server.close()


def test_by_keyboard_and_for_a_screen_reader(browser: Any, worker: ServedManager) -> None:
    browser.get(worker.server.url)
    until(browser, "document.querySelectorAll('[aria-label=handles]').length === 1")
    tab = webdriver.Keys.TAB
    # the choice of the span, then the table of handles
    webdriver.ActionChains(browser).send_keys(tab, tab).perform()
    assert (
        browser.execute_script("return document.activeElement.getAttribute('aria-label')")
        == "handles"
    )
    browser.execute_script("window.before = document.querySelector('article')")
    until(browser, "document.querySelector('article') !== window.before")
    # also after it was drawn anew
    assert (
        browser.execute_script("return document.activeElement.getAttribute('aria-label')")
        == "handles"
    )
    # Asked in one go: the page draws itself anew every second.
    labels, scopes = browser.execute_script(
        "return [[...document.querySelectorAll('[role=img]')].map(n => "
        "n.getAttribute('aria-label')), [...document.querySelectorAll('th')].map(n => "
        "n.getAttribute('scope'))]"
    )
    assert len(labels) == 2
    assert all(labels)
    assert set(scopes) == {"col", "row"}
    assert browser.find_element("id", "status").get_attribute("aria-live") == "polite"


def test_names_of_users_are_text_and_never_markup(browser: Any) -> None:
    manager = placement.Manager(device=SimulatedDevice(32 * CHUNK))
    with manager.serve(identity=Identity(node="<img src=x onerror=boom()>")) as server:
        browser.get(server.url)
        until(
            browser,
            "document.querySelector('h2') && "
            "document.querySelector('h2').textContent.includes('<img')",
        )
        assert not browser.find_elements("css selector", "main img")
        assert severe(browser) == []
