"""The pages in a real browser: nothing in the console, nothing too wide, readable, usable with the keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.compare.made import STEADY, runs
from tests.tools.report.browser import Browser, executable
from veomni_hook.tools.cli.compare import rows_of
from veomni_hook.tools.compare.page import page_of
from veomni_hook.tools.compare.report import report_of

PROBE = Path(__file__).with_name("probe.js").read_text(encoding="utf-8")
PROGRAM = executable()
#: Focus after a key, and whether it can be seen: it has an outline, and lies within the window.
FOCUS = """(() => {
  const one = document.activeElement, box = one.getBoundingClientRect();
  const outline = getComputedStyle(one).outlineStyle;
  const order = [...document.querySelectorAll("a, summary, main")].indexOf(one);
  return [one.tagName, one.getAttribute("href"), order, outline !== "none" && box.top >= 0 && box.top < innerHeight];
})()"""
#: Where the two sides of a changed line stand.
STACKED = """(() => {
  const row = document.querySelector("tr.changed"), [left, right] = ["l", "r"].map(
    side => row.querySelector(`.n.${side}`).getBoundingClientRect());
  return right.top >= left.bottom - 1;
})()"""

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="there is no chromium; Debian has it as the package chromium"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(str(PROGRAM), tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(params=["written", "live"])
def file(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_nothing_is_too_wide_too_pale_or_said(browser: Browser, file: Path, scheme: str, width: int) -> None:
    browser.said.clear()
    browser.open(file, width=width, scheme=scheme)
    found: dict[str, Any] = browser.run(PROBE)
    checked, title = found.pop("checked"), found.pop("title")
    assert found == {name: [] for name in ("overflow", "contrast", "unnamed", "headings", "small")}
    assert checked > 500 and title != "taken"
    assert browser.said == []
    light = browser.run("matchMedia('(prefers-color-scheme: light)').matches")
    page = browser.run("getComputedStyle(document.body).backgroundColor")
    assert light is (scheme == "light") and (page == "rgb(255, 255, 255)") is light
    assert browser.run(STACKED) is (width == 400)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_the_page_of_a_comparison(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    made = runs([STEADY] * 2, [STEADY] * 2, (2.0, 1.0), (2.0, 1.01))
    made[1].status, made[1].stopped, made[1].said = 3, False, ["ValueError: " + "x" * 200]
    found = report_of(made, ["train.py", "--output_dir", "/tmp/" + "long" * 40], 20, 3)
    file = tmp_path / "page.html"
    file.write_text(page_of(found, rows_of(found)), encoding="utf-8")
    browser.said.clear()
    browser.open(file, width=width, scheme=scheme)
    probed: dict[str, Any] = browser.run(PROBE)
    assert probed.pop("checked") > 50 and probed.pop("title") == "veomni-hook compare"
    assert probed == {name: [] for name in ("overflow", "contrast", "unnamed", "headings", "small")}
    assert browser.said == []


def test_the_keyboard_is_enough(browser: Browser, file: Path) -> None:
    browser.open(file, width=1400, scheme="light")
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    stops = []
    for _ in range(12):
        browser.press("Tab", 9)
        stops.append(browser.run(FOCUS))
    assert stops[0][1] == "#main" and all(seen for *_, seen in stops)
    orders = [order for _, _, order, _ in stops]
    assert orders == sorted(set(orders))
    browser.open(file, width=1400, scheme="light")
    browser.press("Tab", 9)
    browser.press("Enter", 13)
    assert browser.run("document.activeElement.id") == "main"
    browser.run("document.querySelector('.diff summary').focus()")
    browser.press("Enter", 13)
    assert browser.run("document.querySelector('.diff details').open") is True


def test_links_of_the_table_show_their_lines(browser: Browser, file: Path) -> None:
    browser.open(file, width=1400, scheme="light")
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    count = browser.run("document.querySelectorAll('.places th a').length")
    assert count >= 5
    shown = """(() => {
      const link = document.querySelectorAll(".places th a")[%d];
      link.click();
      const box = document.querySelector(link.getAttribute("href")).getBoundingClientRect();
      const head = document.querySelector(".sides").getBoundingClientRect();
      return box.top >= head.bottom - 1 && box.bottom <= innerHeight && box.height > 0;
    })()"""
    assert [at for at in range(count) if not browser.run(shown % at)] == []
