"""docs/assets/tables.js in a real browser: a link to data gets a table with a search, and says so if it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.tables import DATA
from tests.tools.report.browser import Browser, executable

PROGRAM = executable()
SCRIPT = DATA.parent / "assets" / "tables.js"
ROWS = [{"family": "dense", "routed": ["a `b`", "c"]}, {"family": "sparse", "routed": []}]
#: Reads of files are refused in a page that is a file, so the answer to `fetch` is given.
PAGE = """<!doctype html><title>Page</title>
<article><ul><li><a href="data/x.json">data/x.json</a></li><li><a href="data/x.json">again</a></li></ul></article>
<script>fetch = () => Promise.resolve({answer});</script><script src="{script}"></script>"""
STATE = """(async () => {
  await new Promise((done) => setTimeout(done));
  const input = document.querySelector("input"), body = document.querySelector("tbody");
  if (!input) return document.querySelector(".data").textContent;
  input.value = "DENSE c";
  input.dispatchEvent(new Event("input"));
  return [document.querySelectorAll(".data").length, document.querySelector("thead").textContent,
    [...body.rows].map((row) => row.hidden), body.querySelector("code").textContent,
    document.querySelector("output").textContent];
})()"""


@pytest.mark.skipif(PROGRAM is None, reason="there is no chromium; Debian has it as the package chromium")
def test_a_link_to_data_gets_a_table(tmp_path: Path) -> None:
    answers = {
        "good": f"{{ok: true, json: () => {json.dumps(ROWS)}}}",
        "bad": "{ok: false, statusText: 'Not Found'}",
    }
    with Browser(str(PROGRAM), tmp_path / "profile") as browser:
        shown = {}
        for name, answer in answers.items():
            file = tmp_path / f"{name}.html"
            page = PAGE.replace("{answer}", answer).replace("{script}", SCRIPT.as_uri())
            file.write_text(page, encoding="utf-8")
            browser.open(file, width=1000, scheme="light")
            shown[name] = browser.run(STATE)
    assert shown["good"] == [1, "familyrouted", [False, True], "b", "1 of 2 rows"]
    assert "cannot be shown here (Not Found)" in shown["bad"]
