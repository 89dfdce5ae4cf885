"""The counts of what serves VeOmni's patches are those of the full list. Whether the list is current:
tests/veomni/test_parity_table.py."""

from __future__ import annotations

import re
from collections import Counter

from scripts import tables, veomni_parity
from veomni_hook.tools.migration.answers import HERE, NOT_NEEDED, NOT_YET, PARTLY, STATUSES, Answer
from veomni_hook.tools.migration.concerns import Concern
from veomni_hook.tools.migration.vocabulary import MEANINGS

ROWS = tables.read("veomni-parity")
SUMMARY = veomni_parity.SUMMARY.read_text(encoding="utf-8")


def test_the_counts_are_those_of_the_list() -> None:
    counted = veomni_parity.counted(ROWS)
    assert counted == veomni_parity.tabled(SUMMARY)
    assert {name for found in counted.values() for name, _ in found} <= {*MEANINGS}
    assert counted[True]["loss", HERE] > 30, "the list is not read"


def test_the_numbers_of_patches_are_those_of_the_list() -> None:
    patches = {(row["config"], *row["target"]) for row in ROWS if row["kind"] == veomni_parity.PATCH}
    told = re.search(r"has (\d+) patches in (\d+) configs", SUMMARY)
    assert told is not None
    assert [*map(int, told.groups())] == [len(patches), len({row["config"] for row in ROWS})]
    parts = re.search(
        r"(\d+)\s+of\s+them\s+need\s.*?(\d+)\s+are\s+served\s+in\s+part,\s+(\d+)\s+not", SUMMARY, re.DOTALL
    )
    assert parts is not None and sum(map(int, parts.groups())) == len(patches)


def entry(kind: str, *answers: tuple[str, str]) -> veomni_parity.Entry:
    return veomni_parity.Entry(
        kind,
        ("Tiny.forward",),
        tuple((Concern(name, "seen"), Answer(status, "this")) for name, status in answers),
    )


def test_a_patch_is_served_if_everything_that_it_is_for_is() -> None:
    assert entry("patch", ("kernel", HERE), ("autograd", NOT_NEEDED)).status == HERE
    assert entry("patch", ("kernel", HERE), ("packing", NOT_YET)).status == PARTLY
    assert entry("patch", ("log-probs", PARTLY)).status == PARTLY
    assert entry("patch", ("packing", NOT_YET), ("autograd", NOT_NEEDED)).status == NOT_YET


def test_what_is_written_is_read_again(monkeypatch) -> None:
    monkeypatch.setattr(veomni_parity, "_version", lambda name: "1")
    patches = (entry("patch", ("kernel", HERE), ("host sync", NOT_YET)), entry("patch", ("kernel", PARTLY)))
    held = [veomni_parity.Judged("tiny_gpu", (*patches, entry("helper", ("kernel", NOT_YET))))]
    listed, table = [*veomni_parity.rows(held)], veomni_parity.summary(held)
    assert "1 has 2 patches in 1 configs" in table and "0 of them need nothing more" in table
    document = veomni_parity.written(f"head\n{veomni_parity.BEGIN}old\n{veomni_parity.END}tail\n", table)
    assert document.startswith("head\n") and document.endswith("tail\n") and "old" not in document
    expected = {
        True: Counter({("kernel", HERE): 1, ("kernel", PARTLY): 1, ("host sync", NOT_YET): 1}),
        False: Counter({("kernel", NOT_YET): 1}),
    }
    assert veomni_parity.counted(listed) == expected == veomni_parity.tabled(document)
    assert len(STATUSES) == 4
