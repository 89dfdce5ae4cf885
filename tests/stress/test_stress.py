"""The stress suite in small, that it can fail, and that its document is that of its lists."""

import ast
import logging
import random
from collections import Counter
from pathlib import Path

import pytest

from scripts import tables
from tests.stress import document
from tests.stress import generated as generator
from tests.stress.__main__ import PARTS, in_worker
from tests.stress.forms import forms
from tests.stress.perturbing import STRUCTURE, WORDS, perturbed
from tests.stress.result import COLUMNS, Line, Part
from tests.stress.spoiled import sloppy_idioms
from tests.stress.stand import ROOT
from tests.stress.starts import starts
from tests.stress.tamperings import TAMPERINGS
from tests.stress.trial import FAILURES, tried


@pytest.fixture(autouse=True)
def quiet():
    """Slots say that upstream's code runs, for every call."""
    logger = logging.getLogger("veomni_hook")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def test_starts_at_once(tmp_path):
    part = starts(tmp_path, 4, 0, seed=0)
    assert part.ok, part.failures
    assert part.total().count == 4


def test_starts_that_break_each_other_are_found(tmp_path, monkeypatch):
    # What a start finds, and the cache that it leaves, are looked at apart.
    monkeypatch.setattr(
        "tests.stress.starts.SMALL", "import os, sys; os.write(int(sys.argv[1]), b'1'); raise SystemExit(3)"
    )
    part = starts(tmp_path, 2, 0, seed=0)
    assert not part.ok
    assert any("status 3" in failure for failure in part.failures)


def test_kills(tmp_path):
    part = in_worker("kills", tmp_path, 12, 0)
    assert part.ok, part.failures
    assert part.total().count == 12


@pytest.mark.slow
def test_a_store_that_writes_in_place_is_found(tmp_path):
    part = in_worker("kills", tmp_path, 200, 0, "publishing is not atomic")
    assert not part.ok
    assert part.total().lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("texts are unchecked", "random bytes"),
        pytest.param("bytecode is unchecked", "code planted", marks=pytest.mark.slow),
        pytest.param("owners are unchecked", "another user's", marks=pytest.mark.slow),
    ],
)
def test_a_cache_that_does_not_check_is_found(tmp_path, fault, name):
    assert in_worker("tampering", tmp_path / "right", 0, 0, "", name).ok
    part = in_worker("tampering", tmp_path / "spoiled", 0, 0, fault, name)
    assert not part.ok
    assert any(failure.startswith(name) for failure in part.failures), part.failures


def test_changes_of_what_configs_depend_on(tmp_path):
    part = in_worker("dependencies", tmp_path / "right", 20, 0)
    assert part.ok, part.failures
    assert part.total().count == 25


@pytest.mark.slow
def test_a_dependency_that_is_not_seen_is_found(tmp_path):
    part = in_worker("dependencies", tmp_path / "spoiled", 150, 0, "variables are not seen")
    assert part.total().wrong


@pytest.mark.slow  # `make stress` does the same
def test_every_tampering_is_a_miss_or_harmless(tmp_path):
    part = in_worker("tampering", tmp_path, 2, 0)
    assert part.ok, part.failures
    assert [line.what for line in part.lines] == [one.name for one in TAMPERINGS]
    assert all(line.count for line in part.lines)


def test_tamperings_have_names_of_their_own():
    assert len({one.name for one in TAMPERINGS}) == len(TAMPERINGS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("op", list(generator.WEIGHTS))
def test_plain_forms_are_routed_and_equal(op):
    for form in forms()[op]:
        came = tried(form, form.source, random.Random(0))
        assert came.outcome in ("equal", "rounding"), (form.name, came)


def test_generated_modules_are_equal_or_not_routed():
    came = Counter(one.outcome for number in range(3) for one in generator.chunk(0, number))
    assert came["equal"] + came["rounding"] > 5
    assert came["not routed"] > 5
    assert not {*came} & {*FAILURES}


def test_an_idiom_that_takes_look_alikes_is_found():
    form = next(one for one in forms()["rotary"] if one.name == "half_split")
    others = [other for name, other in perturbed(form) if name in dict((w[0], 0) for w in WORDS["rotary"])]
    assert {tried(one, one.source, random.Random(0)).outcome for one in others} <= {
        "not routed",
        "equal",
        "rounding",
    }
    undo = sloppy_idioms()
    try:
        tried(form, form.source, random.Random(0))  # what it has seen once
        came = Counter(tried(one, one.source, random.Random(0)).outcome for one in others)
    finally:
        undo()
    assert came["wrong"] > 2


def test_the_same_seed_gives_the_same_modules():
    first, again, other = ([source for *_, source in generator.drawn(seed, 20)] for seed in ("1", "1", "2"))
    assert first == again != other
    assert len(set(first)) > 15
    for source in first:
        ast.parse(source)


def test_every_perturbation_has_a_form():
    found = {(op, name) for op, of in forms().items() for form in of for name, _ in perturbed(form)}
    assert found >= {(op, name) for op, words in WORDS.items() for name, *_ in words}
    assert {name for _, name in found} >= {name for name, _ in STRUCTURE}


def test_a_part_says_whether_it_is_good():
    good = Part("kills", 1, 2.0, [Line("a", 3)])
    assert good.ok
    assert not Part("kills", 1).ok
    for field in ("lost", "wrong", "failed"):
        assert not Part("kills", 1, 2.0, [Line("a", 3), Line("b", 1, **{field: 1})]).ok
    assert Part.from_json(good.to_json()) == good


def test_the_table_is_that_of_the_lists():
    rows = tables.read("stress")
    told = {part: {row["what"]: row["note"] for row in rows if row["part"] == part} for part in PARTS}
    assert told["tampering"] == {one.name: document.outcomes(one) for one in TAMPERINGS}, (
        "make stress ARGS=--document writes it anew"
    )
    assert {*told["generated"]} == {*generator.WEIGHTS}
    assert {row[name] for row in rows for name in COLUMNS[3:6]} == {"0"}
    for part in PARTS:
        count = sum(int(row["how many"].replace(",", "")) for row in rows if row["part"] == part)
        assert f"| {part} | in all | {count:,} | 0 | 0 | 0 |" in document.PAGE.read_text(encoding="utf-8")


def test_the_table_and_the_sums_are_made_of_parts(monkeypatch, tmp_path):
    (tmp_path / "page.md").write_text(f"head\n{document.BEGIN}old\n{tables.END}tail\n", encoding="utf-8")
    monkeypatch.setattr(document, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tables, "DATA", tmp_path)
    tampered = Part("tampering", 5, 1.0, [Line(one.name, 2) for one in TAMPERINGS])
    document.write([Part("kills", 5, 2.0, [Line("alone", 1000, note="fast")]), tampered])
    first, *_, last = tables.read("stress")
    assert [*first.values()] == ["kills", "alone", "1,000", "0", "0", "0", "fast"]
    assert last["note"] == document.outcomes(TAMPERINGS[-1])
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith("head\n") and page.endswith("tail\n") and "old" not in page
    assert "| kills | in all | 1,000 | 0 | 0 | 0 | 2 s, seed 5 |" in page


def test_the_documents_name_the_command():
    assert "make stress" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert isinstance(Path(ROOT / "Makefile").read_text(encoding="utf-8").index("\nstress:"), int)
