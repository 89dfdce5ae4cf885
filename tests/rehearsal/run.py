"""One rehearsal: all modules in each kind of rewrite, idioms over all of them, and the proof over some."""

from __future__ import annotations

import ast
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from tests.proof.runner import PROVED
from tests.rehearsal.code import Facts
from tests.rehearsal.kinds import rewritten
from tests.rehearsal.proving import Proved, proved
from tests.rehearsal.release import Release
from tests.rehearsal.sites import Became, Found, became, found
from veomni_hook.finders.targets import is_target

#: Of sites in all modules: routed as before, routed otherwise (with another variant, or without a help to its speed), missed
#: with a reason, lost without a word, given a wrong operand or computing another number. Of those in modules that are proven: proven, not proven although the original is, computing the same
#: without the hook as the original. Of modules: rewrites that are none, which is a defect of this program.
COLUMNS = ("routed", "otherwise", "missed", "lost", "wrong", "proven", "unproven", "same", "broken")
FAILURES = ("wrong", "broken")


@dataclass
class Result:
    """What became of everything in one kind of rewrite."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    sites: list[tuple[str, Became]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, module: str, one: Became) -> None:
        """Count what became of one site."""
        self.counts[one.what] += 1
        self.sites.append((module, one))
        if one.what in (*FAILURES, "lost"):
            self.failures.append(f"{one.what}: {module} {one.target} {one.op}: {one.detail}")

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it."""
        sites = [{"module": module, **asdict(one)} for module, one in self.sites if one.what != "routed"]
        return {"kind": self.kind, "counts": self.counts, "sites": sites, "failures": self.failures}


@dataclass
class Rehearsal:
    """A release, rewritten in all kinds.

    Attributes:
        release: the original.
        modules: which of its modules of models take part.
        seed: of everything random.
        jobs: processes.
        proven: how many modules are proven.
        folder: where rewritten releases are written.
    """

    release: Release
    modules: list[str]
    seed: int
    jobs: int
    proven: int
    folder: Path

    @cached_property
    def facts(self) -> Facts:
        """What rewrites must know of the release."""
        return self.release.facts(self.seed)

    @cached_property
    def sample(self) -> list[str]:
        """The modules that are proven."""
        draw = random.Random(f"{self.seed} sample")
        return sorted(draw.sample(self.modules, min(self.proven, len(self.modules))))

    @cached_property
    def _original(self) -> dict[str, Proved]:
        done = self._proved(self.sample, self.release.folder)
        if failed := {module: why for module, why in done.items() if isinstance(why, str)}:
            raise RuntimeError(f"modules of the original cannot be imported: {failed}")
        return {module: each for module, each in done.items() if not isinstance(each, str)}

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.jobs)

    def proven_by_itself(self) -> int:
        """How many sites of the sample are proven in the original."""
        return sum(each["outcome"] in PROVED for sites in self._original.values() for each in sites.values())

    def _proved(self, modules: list[str], folder: Path) -> dict[str, Proved | str]:
        return dict(proved(modules, folder, self.folder / "cache", self.jobs)) if modules else {}

    def of(self, kind: str) -> Result:
        """Rewrite all modules in one way, and say what became of their sites."""
        result, texts = Result(kind), dict[str, str]()
        names = self.facts.names if kind == "parameters renamed" else {}
        # What is proven imports others, and a parameter is renamed in all of a release or not at all.
        everything = sorted(self.release.files if names and self.sample else self.modules)
        work = partial(_rewritten, kind, self.release, self.seed, self.facts, names, frozenset(self.modules))
        chunk = max(1, len(everything) // (8 * self.jobs))
        for module, (made, sites) in zip(
            everything, self._pool.map(work, everything, chunksize=chunk), strict=True
        ):
            if isinstance(made, str):
                result.add(module, Became("-", "-", "broken", made))
                continue
            texts |= made
            for one in sites:
                result.add(module, one)
        folder = self.folder / kind.replace(" ", "_")
        written = self.release.written(texts, folder)
        for module, verdicts in sorted(self._proved(self.sample, written.folder).items()):
            self._compared(result, module, verdicts)
        return result

    def _compared(self, result: Result, module: str, verdicts: Proved | str) -> None:
        """Compare the proof of a rewritten module with that of the original."""
        if isinstance(verdicts, str):
            result.add(module, Became("-", "-", "broken", f"it cannot be imported: {verdicts}"))
            return
        original = self._original[module]
        for key, verdict in verdicts.items():
            op, target, _ = key.split(" ")
            before = original.get(key)
            if before is not None and before["outcome"] not in PROVED:
                continue
            if verdict["outcome"] in PROVED:
                result.counts["proven"] += 1
            elif verdict["outcome"] == "differs":
                result.add(module, Became(op, target, "wrong", verdict["detail"]))
            else:
                result.counts["unproven"] += 1
                result.sites.append((module, Became(op, target, "unproven", verdict["detail"])))
            # Of a part of a method, a rewrite may read other names: then it got something else.
            pairs = [[*zip(*each["digests"], strict=True)] for each in (before or {"digests": []}, verdict)]
            if pairs[0] and pairs[1] and pairs[0][0] == pairs[1][0]:
                if pairs[0][1] == pairs[1][1]:
                    result.counts["same"] += 1
                else:
                    result.add(
                        module, Became(op, target, "broken", "it computes something else without the hook")
                    )


@cache
def _before(release: Release, module: str) -> list[Found]:
    return found(module, release.text(module))


def _rewritten(
    kind: str,
    release: Release,
    seed: int,
    facts: Facts,
    names: dict[str, str],
    judged: frozenset[str],
    module: str,
) -> tuple[dict[str, str] | str, list[Became]]:
    """The texts of a rewritten module, or why there are none; and what became of its sites."""
    try:
        texts = rewritten(kind, module, release.text(module), seed, facts)
        for name, text in texts.items():
            compile(text, name, "exec", dont_inherit=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    if module not in judged:
        return texts, []
    if kind != "unparsed" and texts == {module: ast.unparse(ast.parse(release.text(module))) + "\n"}:
        return texts, [Became(*one.key, "routed") for one in _before(release, module) if one.routed]
    try:
        # Modules that the hook does not patch are not asked.
        asked = [name for name in texts if is_target(name)]
        after = [each for name in asked for each in found(name, texts[name])]
    except Exception as error:
        return texts, [Became("-", "-", "lost", f"idioms fail: {type(error).__name__}: {error}")]
    return texts, became(_before(release, module), after, names)
