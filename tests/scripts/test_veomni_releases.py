"""The table of VeOmni's configs on newer releases; a run over all of them needs VeOmni and minutes."""

import pytest

from scripts.veomni_releases import BEGIN, END, PAGE, placed, table

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


def test_counts_and_lists():
    lines = table(FOUND, "0.1.12")
    assert "The 2 configs of VeOmni 0.1.12" in lines[0]
    (head,) = [line for line in lines if line.startswith("| Config")]
    assert head.count("5.17.0") == head.count("5.23.0") == 5
    assert "| llama_gpu | 1 | 1 |  |  |  |  | 1 | 1 |  |  |" in lines
    assert "| all | 2 | 1 | 1 | 1 |  |  | 1 | 2 | 1 | 1 |" in lines
    assert "- llama_gpu: moved in 5.23.0: `B.forward`." in lines
    assert lines[-1] == (
        "- vision_gpu: moved in 5.17.0 and 5.23.0: `C.forward`; gone in 5.17.0 and 5.23.0: `C.angles`; "
        "FAILS in 5.23.0: `C.new`."
    )


def test_the_page_has_a_place_for_it():
    text = PAGE.read_text(encoding="utf-8")
    once = placed(text, ["a table"])
    assert "a table" in once.partition(BEGIN)[2].partition(END)[0]
    assert placed(once, ["a table"]) == once
    with pytest.raises(SystemExit, match="no markers"):
        placed("no page", [])
