"""The counts of what serves VeOmni's patches are those of the full list. Whether the list is current:
tests/veomni/test_parity_table.py."""

from __future__ import annotations

import re
from collections import Counter

from scripts import tables, veomni_parity
from veomni_hook.tools.migration.answers import BY_DESIGN, MISSING, SAME, STATUSES, Answer, releases_measured
from veomni_hook.tools.migration.concerns import Concern
from veomni_hook.tools.migration.vocabulary import MEANINGS

ROWS = tables.read("veomni-parity")
SUMMARY = veomni_parity.PAGE.read_text(encoding="utf-8")
RELEASES = releases_measured()
NEW = "9.9.9"


def test_the_counts_are_those_of_the_list() -> None:
    counted = {release: veomni_parity.counted(ROWS, release) for release in RELEASES}
    assert counted == veomni_parity.tabled(SUMMARY, RELEASES)
    assert {name for counts in counted[RELEASES[0]].values() for name, _ in counts} <= {*MEANINGS}
    assert counted[RELEASES[-1]][True]["loss", SAME] > 30, "the list is not read"


def test_the_numbers_of_patches_are_those_of_the_list() -> None:
    patches = {(row["config"], *row["target"]) for row in ROWS if row["kind"] == veomni_parity.PATCH}
    told = re.search(r"has (\d+) patches in (\d+) configs", SUMMARY)
    assert told is not None
    assert [*map(int, told.groups())] == [len(patches), len({row["config"] for row in ROWS})]
    for release in RELEASES:
        parts = re.search(rf"(?m)^\| {re.escape(release)} \| (\d+) \| (\d+) \| (\d+) \|$", SUMMARY)
        assert parts is not None and sum(map(int, parts.groups())) == len(patches)


def entry(kind: str, *answers: tuple[str, str]) -> veomni_parity.Entry:
    return veomni_parity.Entry(
        kind,
        ("Tiny.forward",),
        tuple((Concern(name, "seen"), {NEW: Answer(status, "this")}) for name, status in answers),
    )


def test_a_patch_has_the_same_effect_if_everything_that_it_is_for_has() -> None:
    assert entry("patch", ("kernel", SAME), ("autograd", SAME)).status(NEW) == SAME
    assert (
        entry("patch", ("kernel", SAME), ("packing", MISSING), ("numerics", BY_DESIGN)).status(NEW) == MISSING
    )
    assert entry("patch", ("numerics", BY_DESIGN), ("autograd", SAME)).status(NEW) == BY_DESIGN


def test_what_is_written_is_read_again(monkeypatch) -> None:
    monkeypatch.setattr(veomni_parity, "version", lambda name: "1")
    patches = (
        entry("patch", ("kernel", SAME), ("host sync", MISSING)),
        entry("patch", ("kernel", BY_DESIGN)),
    )
    judged = [veomni_parity.Judged("tiny_gpu", (*patches, entry("helper", ("kernel", MISSING))))]
    listed, lines = [*veomni_parity.rows(judged)], veomni_parity.summary(judged, [NEW])
    assert "1 has 2 patches in 1 configs" in lines[0] and f"| {NEW} | 0 | 1 | 1 |" in lines
    document = f"head\n{veomni_parity.BEGIN}old\n{tables.END}tail\n"
    document = tables.placed(document, veomni_parity.BEGIN, lines)
    assert document.startswith("head\n") and document.endswith("tail\n") and "old" not in document
    expected = {
        True: Counter({("kernel", SAME): 1, ("kernel", BY_DESIGN): 1, ("host sync", MISSING): 1}),
        False: Counter({("kernel", MISSING): 1}),
    }
    assert veomni_parity.counted(listed, NEW) == expected == veomni_parity.tabled(document, [NEW])[NEW]
    assert len(STATUSES) == 3
