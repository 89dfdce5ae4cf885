"""Generated modules, each patched and run against itself unpatched.

A module is drawn in steps: a form, plain or with a named perturbation; a random other spelling of it; and, of
each spelling, some with one more random change. Texts that were drawn before do not count, and neither do those
whose original raises.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

from tests.stress.result import Line, Part

#: How often each op is drawn: what costs most is drawn least.
WEIGHTS = {"norms": 30, "rotary": 22, "MLPs": 22, "experts": 8, "routers": 8, "losses": 10}
CHUNK = 40
#: How many texts come of one spelling: itself, and others with a change more.
CHANGED = 2
#: Seconds for one module: a changed loop may not end.
_PATIENCE = 30
#: Failures that are kept in words.
_KEPT = 200


@dataclass(frozen=True)
class Generated:
    """One generated module, and what became of it."""

    op: str
    form: str
    how: str
    digest: bytes
    outcome: str
    calls: int
    detail: str = ""
    source: str = ""


def generated(count: int, seed: int, workers: int) -> Part:
    """Try `count` different modules in `workers` processes."""
    began = time.monotonic()
    part = Part("generated", seed)
    tally = _Tally(part, count)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
        numbers = iter(range(10**9))
        running: set[Future[list[Generated]]] = {
            pool.submit(chunk, seed, next(numbers)) for _ in range(min(2 * workers, 1 + count // CHUNK))
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                tally.add(one.result())
                if not tally.full:
                    running.add(pool.submit(chunk, seed, next(numbers)))
    part.lines = tally.lines()
    part.seconds = time.monotonic() - began
    return part


class _Tally:
    """Counts distinct modules until there are enough."""

    def __init__(self, part: Part, count: int) -> None:
        self._part, self._count = part, count
        self._seen: set[bytes] = set()
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[str] = Counter()
        self._tried = 0

    @property
    def full(self) -> bool:
        """Whether there are enough."""
        return self._tried >= self._count

    def add(self, found: list[Generated]) -> None:
        """Count modules whose texts are new."""
        from tests.stress.trial import FAILURES

        for one in found:
            if self.full or one.digest in self._seen:
                continue
            self._seen.add(one.digest)
            self._outcomes[one.op, one.outcome] += 1
            self._calls[one.op] += one.calls
            self._tried += one.outcome != "broken"
            if one.outcome in FAILURES and len(self._part.failures) < _KEPT:
                what = f"{one.op}, {one.form}, {one.how}: {one.outcome}: {one.detail}"
                self._part.failures.append(f"{what}\n{one.source}")

    def lines(self) -> list[Line]:
        """One line an op."""
        lines = []
        for op in WEIGHTS:
            of = {outcome: number for (each, outcome), number in self._outcomes.items() if each == op}
            routed = sum(of.get(name, 0) for name in ("equal", "rounding", "upstream's", "in place"))
            note = (
                f"{routed:,} routed ({of.get('equal', 0):,} equal bit for bit, {of.get('rounding', 0):,} within rounding, "
                f"{of.get(_UPSTREAMS, 0):,} left to the original's code, {of.get('in place', 0):,} refused by autograd), "
                f"{of.get('not routed', 0):,} not routed; "
                f"{self._calls[op]:,} pairs of runs compared; {of.get('broken', 0):,} more raise by themselves"
            )
            count = sum(of.values()) - of.get("broken", 0)
            failed = of.get("guard fails", 0) + of.get("patching fails", 0)
            lines.append(Line(op, count, wrong=of.get("wrong", 0), failed=failed, note=note))
        return lines


_UPSTREAMS = "upstream's"


def _start() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.getLogger("veomni_hook").setLevel(logging.ERROR)
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"a module was not done within {_PATIENCE} s")


def chunk(seed: int, number: int) -> list[Generated]:
    """Draw and try some modules; the same ones for the same arguments."""
    from tests.stress.trial import Tried, tried

    found = []
    for op, form, how, source in drawn(f"{seed} {number}", CHUNK):
        signal.alarm(_PATIENCE)
        try:
            came = tried(form, source, random.Random(f"{seed} {number}"))
        except TimeoutError as error:
            came = Tried("broken", detail=str(error))
        finally:
            signal.alarm(0)
        digest = blake2b(source.encode(), digest_size=12).digest()
        kept = source if came.outcome in ("wrong", "guard fails", "patching fails") else ""
        found.append(Generated(op, form.name, how, digest, came.outcome, came.calls, came.detail, kept))
    return found


def drawn(seed: str, count: int) -> Iterator[tuple[str, Any, str, str]]:
    """Some modules: op, form, how it was made, text. All of one seed are of one op."""
    from tests.proof.mutants import bodies, mutants
    from tests.stress.forms import forms
    from tests.stress.respelling import respelled

    draw = random.Random(seed)
    op = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    given = 0
    while given < count:
        form = draw.choice(forms()[op])
        how = "plain"
        if others := _perturbed(form):
            if draw.random() < 0.5:
                how, form = draw.choice(others)
        try:
            source = respelled(form.source, form.target, draw, draw.choice((0, 1, 1, 2, 2, 3, 4, 6)))
            compile(source, "generated.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue  # an expression in a place where it may not stand
        yield op, form, how, source
        given += 1
        names = bodies(source, form.target)
        for label, changed in mutants(source, names, CHANGED, f"{seed} {given}"):
            yield op, form, f"{how}; {label}", changed
            given += 1


@cache
def _perturbed(form: Any) -> list[tuple[str, Any]]:
    from tests.stress.perturbing import perturbed

    return list(perturbed(form))
