"""`list` and `explain` show one table: their answers for one model agree."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from veomni_hook.patches.site import slot_name
from veomni_hook.tools.cli.app import app


def shown(*arguments: str) -> Any:
    """The JSON document of a command."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def slots_of(rows: Iterable[Mapping[str, str]]) -> set[str]:
    """The slots that the places in some rows ask."""
    return {slot_name(row["op"], variant) for row in rows for variant in row["variant"].split("|")}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_three_views_of_one_family_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VEOMNI_KERNELS", raising=False)
    by_status: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in shown("list", family):
        if row["op"] not in ("layer_loop", "speech", "tiles"):  # which ask for no kernel
            by_status[row["status"]].append(row)
    routed, without = by_status["routed"], by_status["no_kernel"]
    (listed,) = shown("list", family, "--by", "family")["families"]
    assert listed["ops"] == Counter(row["op"] for row in routed)
    assert listed["no_kernel"] == Counter(row["op"] for row in without)
    explained = shown("explain", family, "--system", "sm90")
    # A place may have formulas that its module does not use: they have no slot.
    slots = {(slot["name"], slot["status"]) for slot in explained["slots"]}
    assert {name for name, _ in slots} <= slots_of([*routed, *without])
    assert slots_of(without) <= {name for name, status in slots if status == "no_kernel"}
    assert {name for name, status in slots if status == "routed"} <= slots_of(routed)
    on_no_machine = {s["name"] for s in explained["slots"] if "no kernel exists" in str(s["decisions"])}
    assert on_no_machine == {name for name, status in slots if status == "no_kernel"}
    missed = {(row["op"], row["target"]) for row in [*by_status["missed"], *by_status["unbound"]]}
    assert missed <= {(site["op"], site["target"]) for site in explained["missed"]}
