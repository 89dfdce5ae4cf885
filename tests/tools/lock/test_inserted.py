"""The arguments of inserted calls: what was bound in the lock has to be bound now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.patches.upstream import HANDED
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.idioms import count_check, recognise, sample_boundaries
from veomni_hook.patches.idioms.absent_modality import find as absent_modality
from veomni_hook.patches.idioms.host_metadata import find as host_metadata
from veomni_hook.patches.idioms.layer_loop import find as layer_loop
from veomni_hook.patches.idioms.row_merge import find as row_merge
from veomni_hook.patches.site import Site, Status
from veomni_hook.tools.lock import Change, Lock, compare, dumps, loads, snapshot
from veomni_hook.tools.lock.changes import ARGUMENTS, NOT_ROUTED, RENAMED, TEXT
from veomni_hook.tools.lock.inserted import inserted_calls, lost, swapped

#: The names of a cache up to transformers 5.23, and since.
CACHE = re.compile(r"\b(past_key_values|cache_params|cache)\b")


@pytest.fixture(autouse=True)
def idiom(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (sample_boundaries, layer_loop, count_check, host_metadata, absent_modality, row_merge)
    monkeypatch.setattr(recognise, "idioms", lambda *_: every)


def upstreams(family: str) -> str:
    spec = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text("utf-8")


def calls(family: str, op: str) -> list[dict[str, dict[str, str]]]:
    return [
        dict(site.calls) for site in snapshot("m", upstreams(family)).sites if site.op == op and site.calls
    ]


def changes(before: str, after: str) -> list[Change]:
    old = loads(dumps(Lock("5.23.0", "e", (), {"m": snapshot("m", before)})), "the test")
    known = {name: body.fingerprint for name, body in old.modules["m"].bodies.items()}
    return compare(old, Lock("5.99.0", "e", (), {"m": snapshot("m", after, known=known)}))


@HANDED
def test_every_idiom_that_inserts_calls_has_its_arguments() -> None:
    (found,) = calls("qwen3_next", "sample_boundaries")
    assert CACHE.fullmatch(found["found"].pop("cache"))
    assert found["found"] == {
        "owner": "self",
        "kwargs": "kwargs",
        "position_ids": "position_ids",
        "attention_mask": "attention_mask",
        "inputs": "input_ids if inputs_embeds is None else inputs_embeds",
        "use_cache": "use_cache",
    }
    assert all(
        {"owner", "cache", "layers"} <= one["refuse"].keys() for one in calls("mamba2", "sample_boundaries")
    )
    (loop,) = calls("llama", "layer_loop")
    assert CACHE.fullmatch(loop["shard"]["cache"]) and loop["gather"]["hidden_states"] == "hidden_states"
    assert {"upstream", "condition", "message"} == calls("qwen2_vl", "count_check")[0]["check"].keys()
    read = [one["read_together"] for one in calls("qwen2_vl", "host_metadata") if "read_together" in one]
    assert [one["sizes"] for one in read] == ["image_grid_thw"] and read[0]["sizes 2"] == "video_grid_thw"
    absent = calls("qwen2_vl", "absent_modality")
    assert [one["plus_zero"]["data"] for one in absent] == ["'pixel_values'", "'pixel_values_videos'"]
    (rows,) = calls("qwen2_vl", "row_merge")
    assert [*rows] == ["call", "call 2"] and rows["call 2"]["operand 3"] == "inputs_embeds"


def unbindable(text: str) -> str:
    """The cache has another name, no class, and other uses: as 5.24 might have been."""
    text = re.sub(r"\bmemory: \w*Cache \| None", "memory: Memory | None", CACHE.sub("memory", text))
    text = re.sub(r"\b\w+Cache\(", "Growing(", text).replace("get_seq_length", "seen")
    return re.sub(r"\bmemory\.(\w+)", r"memory.its_\1", text.replace("cache_utils", "memories"))


def test_a_cache_that_nothing_can_bind_is_lost_in_these_words() -> None:
    """Mamba's boundaries are refused, with or without a cache."""
    before = upstreams("mamba2")
    told = [one for one in changes(before, unbindable(before)) if one.kind == "sample_boundaries"]
    assert told and all(one.matters and one.result == ARGUMENTS for one in told)
    assert all(one.detail.startswith("sample_boundaries lost its cache") for one in told)


@HANDED
def test_a_call_that_needs_the_cache_is_not_inserted_without() -> None:
    before = upstreams("qwen3_next")
    told = {one.kind: one for one in changes(before, unbindable(before)) if one.result == NOT_ROUTED}
    assert {op: one.matters for op, one in told.items()} == {"sample_boundaries": True, "layer_loop": True}
    assert told["sample_boundaries"].detail == "which of its arguments is its cache is not known"


def test_a_renamed_cache_is_the_same_argument() -> None:
    before = upstreams("qwen3_next")
    found = changes(before, CACHE.sub("memory", before))
    assert {one.result for one in found} <= {RENAMED, TEXT}


def test_arguments_that_are_bound_no_more() -> None:
    old = {"f": {"cache": "past", "mask": "None", "sizes": "a", "sizes 2": "b"}, "g": {"x": "x"}}
    assert lost(old, {"f": {"cache": "None", "sizes": "a"}}) == ["cache", "sizes 2"]
    assert lost(old, {"f": {"cache": "kept", "mask": "m", "sizes": "c", "sizes 2": "d"}}) == []


def test_another_parameter_than_before() -> None:
    old = {"f": {"cache": "past", "mask": "mask", "hidden": "x"}}
    new = {"f": {"cache": "positions", "mask": "mask", "hidden": "y"}}
    taken = ["cache", "positions", "mask"]
    assert swapped(old, new, {"past": "cache"}, taken) == [("cache", "past", "positions")]
    assert swapped(old, {"f": {"cache": "cache"}}, {"past": "cache"}, taken) == []
    # A parameter that kept its name, and calls that cannot be told apart.
    assert swapped({"f": {"cache": "cache"}}, {"f": {"cache": "cache"}}, {"cache": "past"}, taken) == []
    assert swapped({"f": {"x": "mask"}, "f 2": {"x": "cache"}}, {"f": {"x": "cache"}}, {}, taken) == []
    assert lost({"f": {"x": "mask"}, "f 2": {"x": "cache"}}, {"f": {"x": "None"}}) == ["x"]


def test_what_is_inserted_at_the_end_of_a_class_is_no_part_of_the_next_statement() -> None:
    source = "class A:\n    def f(self):\n        return 1\nx = 2\n"
    at = source.index("x = 2")
    edit = Edit(at, at, "\n    def g(self):\n        return veomni_host.values(self)\n")
    site = Site(
        "host_metadata",
        "A.f",
        Status.ROUTED,
        edits=(edit,),
        imports=(("veomni_hook.multimodal", "host as veomni_host"),),
    )
    assert inserted_calls(Document(source), site) == {"values": {"tensor": "self"}}


@HANDED
def test_a_neighbour_in_place_of_the_cache_is_told() -> None:
    before = upstreams("qwen3_next")
    (found,) = calls("qwen3_next", "sample_boundaries")
    cache = found["found"]["cache"]
    swap = {cache: "position_ids", "position_ids": cache}
    after = re.sub(r"\b\w+\b", lambda word: swap.get(word[0], word[0]), before)
    told = [one for one in changes(before, after) if one.kind == "sample_boundaries"]
    assert told and told[0].matters
