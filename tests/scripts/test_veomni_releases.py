"""The table of VeOmni's configs on newer releases; a run over all of them needs VeOmni and minutes."""

import re

import pytest

from scripts import tables
from scripts.tables import END, placed
from scripts.veomni_releases import BEGIN, PAGE, VERDICTS, rows, sums

FOUND = {
    "llama_gpu": {
        "5.17.0": {"A.forward": "unnecessary", "B.forward": "applies"},
        "5.23.0": {"A.forward": "unnecessary", "B.forward": "moved"},
    },
    "vision_gpu": {
        "5.17.0": {"C.forward": "moved", "C.angles": "gone", "C.new": "applies"},
        "5.23.0": {"C.forward": "moved", "C.angles": "gone", "C.new": "FAILS"},
    },
}


def test_rows_and_sums():
    assert [*rows(FOUND)][-2:] == [
        {"config": "vision_gpu", "target": "C.angles", "5.17.0": "gone", "5.23.0": "gone"},
        {"config": "vision_gpu", "target": "C.new", "5.17.0": "applies", "5.23.0": "FAILS"},
    ]
    first, *_, head, _, old, new = sums(FOUND, "0.1.12")
    assert "The 2 configs of VeOmni 0.1.12" in first
    assert head == "| Release | applies | applies, renamed | unnecessary | moved | gone | FAILS |"
    assert old == "| 5.17.0 | 2 | 0 | 1 | 1 | 1 | 0 |"
    assert new == "| 5.23.0 | 0 | 0 | 1 | 2 | 1 | 1 |"


def test_the_sums_are_those_of_the_rows():
    held = tables.read("veomni-releases")
    block = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    sums_told = re.findall(r"(?m)^\| (\d+\.\d+\.\d+) \|(.*)\|$", block)
    assert [release for release, _ in sums_told] == list(held[0])[2:]
    for release, counts in sums_told:
        assert [sum(row[release] == one for row in held) for one in VERDICTS] == [
            *map(int, counts.split("|"))
        ]


def test_the_page_has_a_place_for_it():
    text = PAGE.read_text(encoding="utf-8")
    once = placed(text, BEGIN, ["a table"])
    assert "a table" in once.partition(BEGIN)[2].partition(END)[0]
    assert placed(once, BEGIN, ["a table"]) == once
    with pytest.raises(SystemExit, match="no markers"):
        placed("no page", BEGIN, [])
