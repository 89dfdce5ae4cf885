"""``python -m tests.proof.mutate``: change recognised bodies at random; what is still routed must still be equal.

For every form that the idioms recognise, one site stands for all; each mutant is patched, run and compared as
`tests.proof` does with upstream's own code. A mutant that stays routed and whose guard computes something else
than its body is a false positive.
"""

from __future__ import annotations

import ast
import multiprocessing
import random
import sys
import types
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from tests.proof.mutants import mutants
from tests.proof.runner import _start, modules, prover, routed

__all__ = ["Judged", "judge", "representatives"]

#: ``refused``: no longer routed as it was; ``equal``: routed, and guard and body agree; ``broken``: upstream's
#: own body does not run any more, so there is nothing to agree with; ``false positive``: they disagree.
Judged = tuple[str, str]


def representatives(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """One (module, op, target) for each form of each op, the first in the order of modules."""
    seen: set[tuple[str, str, str]] = set()
    found = []
    for name in names:
        for site in routed(name):
            key = (site.op, site.variant, site.form)
            if site.counted and key not in seen:
                seen.add(key)
                found.append((name, site.op, site.target))
    return found


def judge(name: str, op: str, target: str, count: int, seed: int) -> list[Judged]:
    """Judge ``count`` mutants of one site."""
    from tests.proof.build import Unbuildable
    from tests.proof.compare import Differs
    from tests.proof.recogniser import routed_in
    from veomni_hook.patches.engine import Origin, patch_source

    original = import_module(name)
    loader: Any = original.__spec__.loader  # type: ignore[union-attr]
    tree = ast.parse(Path(loader.upstream).read_text(encoding="utf-8"))
    judged: list[Judged] = []
    for label, mutant in mutants(tree, _bodies(tree, target), count, seed):
        source = ast.unparse(mutant)
        sites = [
            site
            for site in routed_in(source, name)
            if site.op == op and site.target == target and site.counted
        ]
        if not sites:
            judged.append(("refused", label))
            continue
        patched = patch_source(
            source, [], Origin(name, str(loader.upstream), "transformers", "0"), idioms=True
        )
        module = _module(original, patched.text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                prover(sites[0])(sites[0], module)
            judged.append(("equal", label))
        except Differs as error:
            judged.append(("false positive", f"{label}: {error}"))
        except (Unbuildable, Exception) as error:
            judged.append(("broken", f"{label}: {type(error).__name__}: {error}"[:200]))
    return judged


def _bodies(tree: ast.Module, target: str) -> list[str]:
    """The target, and the functions and methods of the module that it uses."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    owner = target.rpartition(".")[0]
    methods = {
        node.name
        for cls in tree.body
        if isinstance(cls, ast.ClassDef) and cls.name == owner
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    }
    found, todo = [], [target]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.append(current)
        body: list[ast.stmt] = tree.body
        node: Any = None
        for part in current.split("."):
            node = next((s for s in body if getattr(s, "name", None) == part), None)
            body = getattr(node, "body", [])
        for used in ast.walk(node) if node is not None else ():
            if isinstance(used, ast.Name) and used.id in functions and used.id.startswith("rotate"):
                todo.append(used.id)
            if (
                isinstance(used, ast.Attribute)
                and used.attr in methods
                and used.attr not in ("forward", "__init__")
            ):
                todo.append(f"{owner}.{used.attr}")
    return found


def _module(original: types.ModuleType, text: str) -> types.ModuleType:
    module = types.ModuleType(original.__name__)
    module.__dict__.update(
        __package__=original.__package__, __file__=original.__file__, __spec__=original.__spec__
    )
    # Classes look their module up by name while they are made, and while the proof builds them.
    sys.modules[original.__name__] = module
    try:
        exec(compile(text, str(original.__file__), "exec", dont_inherit=True), module.__dict__)
    finally:
        sys.modules[original.__name__] = original
    return module


def main(
    families: Annotated[list[str] | None, typer.Argument(help="families; all by default")] = None,
    op: Annotated[list[str] | None, typer.Option(help="only these ops")] = None,
    count: Annotated[int, typer.Option(help="mutants of a form")] = 20,
    seed: Annotated[int, typer.Option(help="of the random changes")] = 0,
    workers: Annotated[int, typer.Option(help="processes")] = 2,
) -> None:
    """Change recognised bodies at random; exits 1 if a guard computes something else than its mutated body."""
    chosen = [one for one in representatives(modules(families or ())) if not op or one[1] in op]
    draw = random.Random(seed)
    totals: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    context = multiprocessing.get_context("spawn")
    with (
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool,
    ):
        task = progress.add_task("mutating", total=len(chosen))
        running = {pool.submit(judge, *one, count, draw.randrange(1 << 30)): one for one in chosen}
        for done in as_completed(running):
            name, kind, target = running[done]
            for outcome, label in done.result():
                totals[kind, outcome] += 1
                if outcome == "false positive":
                    wrong.append(f"{name} {target} ({kind}): {label}")
            progress.update(task, advance=1)
    for kind in sorted({kind for kind, _ in totals}):
        print(kind, {outcome: n for (k, outcome), n in sorted(totals.items()) if k == kind})
    for line in wrong:
        print("false positive:", line)
    print(f"{sum(totals.values())} mutants of {len(chosen)} forms, {len(wrong)} false positives")
    sys.exit(bool(wrong) or not totals)


if __name__ == "__main__":
    typer.run(main)
