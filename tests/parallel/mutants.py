"""Cases with a line of the package changed: what the other tests check must then be wrong."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parallel import facts_of_models, facts_of_towers
from tests.parallel.experts import cases, training_cases


def change(place: str, old: str, new: str) -> None:
    """Change the code of ``module:function`` of `veomni_hook`, for everybody who holds that function."""
    module, _, path = place.partition(":")
    function: Any = importlib.import_module(f"veomni_hook.{module}")
    for name in path.split("."):
        function = getattr(function, name)
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{place} does not have {old!r} once:\n{source}"
    names = dict(function.__globals__)
    body = source[source.index("def ") :].replace(old, new)
    exec(compile("from __future__ import annotations\n" + body, function.__code__.co_filename, "exec"), names)
    function.__code__ = names[function.__name__].__code__


def model(case: str, _: Path) -> float:
    """How far a split model is from one process."""
    unfused = case.startswith(("qwen3/", "llama/eager", "deepseek_v32/", "glm5_next/", "deepseek_v4/"))
    return facts_of_models.facts([case], "sp=2", "eager" if unfused else "torch")[case]["worst"]


def layer(routing: str, folder: Path) -> float:
    """How far dispatched experts are from one process."""
    return max(cases.layer(folder, routing).values())


def recompute(perturbed: str, folder: Path) -> float:
    """How far gradients are where a router decides otherwise, or in another order, when it is recomputed."""
    found = cases.recompute(folder, perturbed=perturbed, reentrant=False, k=2)
    far = found["far"] if perturbed == "order" else found["of_experts"]
    _, _, *rows = found["splits"]  # counts, ids and weights, then rows out and sums back, twice
    return far if rows[:2] == rows[2:4] else 1.0


def steps(family: str, folder: Path) -> float:
    """How far gradients are from one process where every rank has experts of its own."""
    return cases.steps(folder, family, ep=2)[""]["gradient"]


def norm(kind: str, folder: Path) -> float:
    """How far the norm over two meshes is from that of whole gradients."""
    return training_cases.clip(folder, ep=2, kind=kind)["far"]


def tower(batch: str, _: Path) -> float:
    """How far a model whose tower is split is from one process."""
    return facts_of_towers.facts("qwen2_5_vl", "eager", [batch])[batch]["worst"]


CHECKS: dict[str, Callable[[str, Path], float]] = {
    "model": model, "tower": tower, "layer": layer, "recompute": recompute, "steps": steps, "norm": norm,
}  # fmt: skip


def facts(mutation: list[str], check: str, given: str, folder: Path) -> list[Any]:
    """Return how far results are before and after the change; an error is the message."""
    before = CHECKS[check](given, folder)
    change(*mutation)
    try:
        return [before, CHECKS[check](given, folder)]
    except Exception as error:
        return [before, f"{type(error).__name__}: {error}"]
