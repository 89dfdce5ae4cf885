"""What inserted calls are given: compared with what upstream's own code hands to caches, masks, layers, towers.

Upstream's text and the text with a site's edits run on stand-ins (`tests.proof.recording`), many times, with
other arguments absent and other branches taken. Here helpers do what they do where nothing is shared or
asked: then both texts do the same, call by call. That shows the operands which flow on. The others are
compared with what the run shows: whose ``update`` was called, which positions a mask function got, which
attributes a method uses. Operands that no run shows are listed as unproven.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.proof.compare import Differs
from tests.proof.inserted_operands import EXPECTED, Facts, dotted
from tests.proof.inserted_runs import MARK, Inserted, Run, Texts
from tests.proof.mutants import changed_arguments, inserted_in
from tests.proof.recogniser import routed_in
from tests.proof.recording import Event, Thing

#: Upstream's methods whose calls are recorded and not run, in forwards around them.
FEATURES = ("get_rope_index", "get_image_features", "get_video_features", "get_audio_features")
#: The ops whose sites are checked.
OPS = (
    "sample_boundaries", "layer_loop", "count_check", "host_metadata", "absent_modality", "row_merge", "row_join",
)  # fmt: skip
#: At most so many runs, and enough of them that complete.
_RUNS, _ENOUGH = 20, 8
#: How many times more where it matters which arguments are absent together.
_MORE = 3
#: The arguments with boundaries among what `refuse` is told of layers.
_ARGUMENTS = re.compile(r"\('[\w.]+', '(\w+)', '\w+'\)")
#: Helpers whose first argument is the module whose method runs.
_OWNED = (
    "found", "refuse", "shard", "gather", "part_of_rows", "rows_to_add", "refused", "plus_zero", "call",
    "kernel", "whole_keys",
)  # fmt: skip
#: Helpers that belong to a share instead.
_SHARES = ("veomni_towers.gather",)


@dataclass
class Checked:
    """What is known of the operands of a site's inserted calls, each ``helper at line: operand``."""

    proven: dict[str, None] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)

    def note(self, call: Inserted, operand: str, holds: bool | None, why: str) -> None:
        """Keep what a run says of an operand.

        Raises:
            Differs: it is another than it should be.
        """
        name = f"{call.helper} (line {call.line}): {operand}"
        if holds is False:
            raise Differs(f"{name} is not {why}")
        if holds:
            self.proven[name] = None
            self.unproven.pop(name, None)
        elif name not in self.proven:
            self.unproven.setdefault(name, why)


class Checker:
    """Compares what a site's inserted calls are given with what it should be.

    Args:
        site: the site.
        name: the module's name.
        upstream: the module's text.
    """

    def __init__(self, site: Any, name: str, upstream: str) -> None:
        self._site = site
        beside = _beside(site, name, upstream)
        self.texts = Texts(name, upstream, [site, *beside], site.target)
        own = Texts(name, upstream, [site], site.target) if beside else self.texts
        self.calls = {ast.dump(each) for each in inserted_in(own.edited, own.aliases)}
        apart = site.op not in ("sample_boundaries", "layer_loop")
        self._shallow = [each for each in FEATURES if apart and not site.target.endswith(each)]
        self._extras = tuple(_ARGUMENTS.findall("".join(edit.text for edit in site.edits)))
        plain: list[Run] = []
        times = _MORE if site.op == "absent_modality" or site.variant == "read_together" else 1
        while len(plain) < times * _RUNS and sum(each.complete for each in plain) < times * _ENOUGH:
            plain.append(self._run(len(plain), edited=False))
        self._facts = Facts(self.texts, plain)

    def _run(self, number: int, *, edited: bool, marks: bool = False) -> Run:
        return self.texts.run(number, edited=edited, marks=marks, shallow=self._shallow, extras=self._extras)

    def check(self) -> Checked:
        """Run the edited text as often as upstream's, and compare.

        Raises:
            Differs: an operand is another than it should be.
        """
        checked = Checked()
        handed = not any("veomni_boundaries.found" in edit.text for edit in self._site.edits)
        for number, plain in enumerate(self._facts.runs):
            run = self._run(number, edited=True)
            plain_calls, calls = plain.calls, run.calls
            if [call.key for call in plain_calls] != [call.key for call in calls] or plain.ended != run.ended:
                pairs = zip(plain_calls, calls, strict=False)
                at = next((call for other, call in pairs if other.key != call.key), None)
                what = "what it ends with" if at is None else _shown(at)
                raise Differs(
                    f"with the inserted calls it does not do what upstream does: {what} (run {number})"
                )
            for call in run.world.inserted:
                self._compare(checked, run, call)
            if not handed and plain.complete:
                marked = self._run(number, edited=True, marks=True)
                handed = any(MARK in each.kwargs for each in marked.world.events)
        if not handed:
            raise Differs("no layer gets the boundaries that were found")
        if not checked.proven and not checked.unproven:
            checked.unproven[f"{self._site.op} of {self._site.target}"] = "no run reaches the inserted call"
        return checked

    def _compare(self, checked: Checked, run: Run, call: Inserted) -> None:
        method = call.helper.partition(".")[2]
        if method in _OWNED and call.helper not in _SHARES:
            checked.note(call, "its module", call.args[0] is call.owner, "the module whose method runs")
        if method not in EXPECTED:
            checked.note(call, "all", True, "")
            return
        for operand, holds, why in EXPECTED[method](self._facts, run, call):
            checked.note(call, operand, holds, why)


def checked(site: Any, name: str, upstream: str) -> Checked:
    """What is known of the operands of a site's inserted calls.

    Raises:
        Differs: an operand is another than it should be.
    """
    return Checker(site, name, upstream).check()


def mutants(site: Any, name: str, upstream: str) -> Iterator[tuple[str, bool]]:
    """Each change of one argument of a site's inserted calls, and whether it is noticed.

    An argument, or an element of a tuple, becomes None or its neighbour.
    """
    checker = Checker(site, name, upstream)
    for label, tree in changed_arguments(checker.texts.edited, checker.texts.aliases, checker.calls):
        checker.texts.edited = tree
        try:
            checker.check()
        except Differs:
            yield label, True
        else:
            yield label, False


def changes(name: str, ops: Sequence[str]) -> list[tuple[str, str, str, bool]]:
    """Of each changed argument in a module: the op, the target, what was changed, and whether it is noticed."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    upstream = Path(spec.origin).read_text(encoding="utf-8")
    sites = [each for each in routed_in(upstream, name) if each.op in (ops or OPS)]
    found = ((site, change) for site in sites if site.op in OPS for change in mutants(site, name, upstream))
    return [(site.op, site.target, *change) for site, change in found]


def main() -> None:
    """``python -m tests.proof.inserted_calls FAMILY ...``: change each argument; exits 1 if none notices one."""
    from tests.proof.runner import modules

    found = [change for name in modules(sys.argv[1:]) for change in changes(name, ())]
    for op, target, label, noticed in found:
        if not noticed:
            print(f"not noticed: {target} ({op}): {label}")
    noticed_, all_ = Counter(op for op, *_, seen in found if seen), Counter(op for op, *_ in found)
    for op, count in sorted(all_.items()):
        print(f"{op}: {noticed_[op]} of {count} changed arguments noticed")
    sys.exit(noticed_ != all_ or not found)


def _beside(site: Any, name: str, upstream: str) -> list[Any]:
    """The other sites that a site's calls depend on."""
    if site.op != "absent_modality":
        return []
    sites = routed_in(upstream, name, site.op)
    return [each for each in sites if each.target == site.target and each.edits != site.edits]


def _shown(event: Event) -> str:
    called = event.callee if isinstance(event.callee, Thing) else type(event.callee).__name__
    name = called if isinstance(called, str) else ".".join(map(str, (dotted(called) or called._s_name,)))
    return f"the call of {name}"


if __name__ == "__main__":
    main()
