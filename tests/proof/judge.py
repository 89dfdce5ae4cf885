"""What becomes of a mutant: refused, or routed and then run with and without its kernel."""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.importing import exec_module
from tests.proof.mutants import bodies, mutants
from tests.proof.recogniser import routed_in
from tests.proof.runner import prover, routed

#: What a mutant may come to. ``refused``: no idiom routes it any more. ``equal``: routed, and guard and body
#: agree bit for bit, or as closely as those of the site itself; ``rounding``: less closely, within rounding.
#: ``not taken``: the body runs, and the guard leaves every call to it. ``broken``: the body raises, without
#: any kernel, or returns nothing. ``not built``: there is no call, because the site could not be made.
OUTCOMES = (
    "refused", "equal", "rounding", "not taken", "broken", "not built",
    "guard fails", "false positive", "unproved",
)  # fmt: skip
#: These fail the run. ``guard fails``: the body runs and the guarded call raises, or patching does.
#: ``unproved``: the site itself cannot be proved, so that nothing can be said of its mutants.
FAILURES = ("guard fails", "false positive", "unproved")
#: How many lines after a site belong to it, in forwards that do more.
_NEAR = {"linear_cross_entropy": 80, "add_rms_norm": 6}
#: How many sites of a form are tried until one is proved.
_TRIED = 6


@dataclass(frozen=True)
class Form:
    """What idioms recognise as one: an op, a variant, and the sites that compute it."""

    op: str
    variant: str
    sites: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Judged:
    """What became of one mutant, or of a form as a whole."""

    op: str
    module: str
    target: str
    outcome: str
    label: str
    detail: str = ""


@dataclass
class _Watched:
    """What a prover ran: whether any call without a kernel worked, and which failed only with one."""

    body_works: bool = False
    body_raises: str = ""
    guard_raises: str = ""
    #: What the last call without a kernel raised.
    last_error: Exception | None = None

    def __call__(self, choice: str, error: Exception | None) -> None:
        if choice == "eager":
            self.last_error = error
            self.body_works |= error is None
            self.body_raises = self.body_raises or _said(error)
        elif self.last_error is None and error is not None:
            self.guard_raises = _said(error)


def forms(names: Sequence[str], ops: Sequence[str] = ()) -> list[Form]:
    """Every form of each op in the modules ``names``, with its sites in their order."""
    found: dict[tuple[str, str, str], list[tuple[bool, str, str]]] = {}
    for name in names:
        for site in routed(name, ops):
            if site.counted:
                called = "nothing calls" not in site.reason
                found.setdefault((site.op, site.variant, site.form), []).append(
                    (not called, name, site.target)
                )
    return [
        Form(op, variant, tuple((name, target) for _, name, target in sorted(sites)))
        for (op, variant, _), sites in found.items()
    ]


def judge(form: Form, count: int, seed: int | str) -> list[Judged]:
    """Judge ``count`` mutants of the first site of a form that can be proved."""
    notes = []
    for name, target in form.sites[:_TRIED]:
        upstream = _upstream(name)
        outcome, detail = _judged(upstream, name, form.op, target)
        if outcome in ("equal", "rounding"):
            break
        notes.append(f"{name.rpartition('.')[2]} {target}: {outcome}: {detail}")
    else:
        name, target = form.sites[0]
        return [Judged(form.op, name, target, "unproved", "the site itself", "; ".join(notes)[:600])]
    judged = []
    near = _near(upstream, name, form.op, target)
    seeded = f"{seed} {name} {target} {form.op}"
    for label, source in mutants(upstream, bodies(upstream, target), count, seeded, near):
        became, why = _judged(source, name, form.op, target, outcome)
        if became == "not built" and label.startswith("__init__ "):
            # Nothing else was changed since it could be built.
            became = "broken"
        judged.append(Judged(form.op, name, target, became, label, why))
    return judged


@cache
def _upstream(name: str) -> str:
    loader: Any = importlib.import_module(name).__spec__.loader  # type: ignore[union-attr]
    return Path(loader.upstream).read_text(encoding="utf-8")


def _near(source: str, name: str, op: str, target: str) -> range | None:
    """The lines of a long forward that an op looks at: those of its tail, or of a sum and its norm."""
    if op not in _NEAR:
        return None
    lines = [site.lineno for site in _sites(source, name, op, target)]
    return range(lines[0] - 3, lines[0] + _NEAR[op]) if lines else None


def _sites(source: str, name: str, op: str, target: str) -> list[Any]:
    """The sites of an op at a target, judged by its own idioms alone."""
    return [s for s in routed_in(source, name, op) if s.counted and s.target == target]


def _judged(source: str, name: str, op: str, target: str, known: str = "") -> tuple[str, str]:
    """The outcome for a source, and its detail; ``known`` is how closely the site itself agrees."""
    from veomni_hook.patches.engine import Origin, patch_source

    try:
        sites = _sites(source, name, op, target)
        if not sites:
            return "refused", ""
        origin = Origin(name, "upstream.py", "transformers", "0")
        patched = patch_source(source, [], origin, idioms=True).text
    except Exception as error:  # whatever upstream writes, patching it must not raise
        return "guard fails", f"patching raises: {_said(error)}"
    outcome, detail, some = _run(sites[0], name, patched, source, mutated=known != "")
    if outcome in ("broken", "not built") and not some:
        # The guard's own text may be what raises: upstream's alone decides.
        plain, _, body_works = _run(sites[0], name, source, source, mutated=True)
        if body_works and outcome == "broken":
            return "guard fails", detail
        outcome = "broken" if plain == "broken" else outcome
    return ("equal" if outcome == known == "rounding" else outcome), detail


def _run(site: Any, name: str, text: str, upstream: str, *, mutated: bool) -> tuple[str, str, bool]:
    """Prove a site in a module of its own; also says whether any call worked without a kernel."""
    from tests.proof import provers

    watched = _Watched()
    # Whatever a mutant computes, without gradients or all zeros, its guard has to compute the same. Where the
    # guard leaves it alone, those of other ops inside of it may be taken, within rounding.
    lenient = {"meaningful": lambda *_: None, "agree": _agree} if mutated else {"agree": provers.agree}
    try:
        with _module(name, text, upstream) as module, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with patch.object(provers, "watchers", [watched]), patch.multiple(provers, **lenient):
                proof = prover(site)(site, module)
        outcome, detail = "rounding" if proof.errors else "equal", ""
    except Exception as error:  # a mutant may raise anything
        outcome, detail = _failed(watched, error)
    return outcome, detail[:300], watched.body_works


def _agree(*runs: Any, dtype: Any, **_: Any) -> dict[str, float]:
    from tests.proof.compare import agree

    return agree(*runs, dtype=dtype)


def _failed(watched: _Watched, error: Exception) -> tuple[str, str]:
    """What it means that a prover raised."""
    from tests.proof.build import Unbuildable
    from tests.proof.compare import Degenerate, Differs
    from tests.proof.provers import Unreached

    if isinstance(error, Degenerate):
        return "unproved", str(error)
    if watched.guard_raises:
        return "guard fails", watched.guard_raises
    if isinstance(error, Differs):
        return ("broken" if str(error) == "nothing to compare" else "false positive"), str(error)
    if isinstance(error, Unreached) and watched.body_works:
        return "not taken", str(error)
    if error is watched.last_error or watched.body_raises:
        return "broken", _said(watched.last_error) or watched.body_raises
    if not isinstance(error, Unbuildable | Unreached):
        return ("guard fails" if watched.body_works else "broken"), _said(error)
    return ("not built" if error.__cause__ is None else "broken"), str(error)


def _said(error: Exception | None) -> str:
    if error is None:
        return ""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(place[0].filename).name}:{place[0].lineno})" if place else ""
    return f"{type(error).__name__}: {error}"[:250] + where


_NUMBERS = itertools.count()


@contextmanager
def _module(name: str, text: str, upstream: str) -> Iterator[types.ModuleType]:
    """A module of ``text`` under the name of an upstream one, from files of its own."""
    original = importlib.import_module(name)
    folder = Path(tempfile.mkdtemp(prefix="mutant"))
    # Each file has a name of its own, since lines of files are held by name.
    number = next(_NUMBERS)
    file, body = folder / f"patched{number}.py", folder / f"upstream{number}.py"
    file.write_text(text, encoding="utf-8")
    body.write_text(upstream, encoding="utf-8")
    module = types.ModuleType(name)
    loader = types.SimpleNamespace(upstream=str(body))
    module.__dict__.update(
        __package__=original.__package__,
        __file__=str(file),
        __spec__=types.SimpleNamespace(loader=loader, parent=original.__package__, name=name),
    )
    # Classes look their module up by name while they are made, and while the proof builds them.
    sys.modules[name] = module
    try:
        exec_module(module, compile(text, str(file), "exec", dont_inherit=True))
        yield module
    finally:
        sys.modules[name] = original
        shutil.rmtree(folder, ignore_errors=True)
