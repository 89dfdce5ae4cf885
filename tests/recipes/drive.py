"""Run recipes as scripts, and write their losses and what `explain` says as JSON (rank 0 does).

``python -m tests.recipes.drive OUT MODEL CHOICES RECIPE...``: each recipe once for each choice of kernels, which
commas separate; ``as-set`` is what the environment says. Imports nothing that a recipe imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
AS_SET = "as-set"
#: What Trainer logs of a step: the loss, and what TRL's trainers add that depends on the model.
LOGGED = ("loss", "grad_norm", "reward", "kl", "entropy", "logps/chosen", "mean_token_accuracy")


def results(names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a recipe has left: of its trainer, its loop, or its workers."""
    import veomni_hook

    if "runs" in names:
        return [{"losses": losses, "explanation": told} for losses, told in names["runs"]]
    if "explanation" in names:
        return [{"losses": names["losses"], "explanation": names["explanation"]}]
    if "trainer" in names:
        trainer = names["trainer"]
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        told = {
            "losses": [entry["loss"] for entry in steps],
            "logged": [[entry[name] for name in LOGGED if name in entry] for entry in steps],
            "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
            "explanation": str(veomni_hook.explain(trainer.model)),
        }
        return [told]
    return [{"losses": names["losses"], "explanation": str(veomni_hook.explain(names["model"]))}]


def run(recipe: str, model: str, choice: str) -> list[dict[str, Any]]:
    """Run one recipe."""
    chosen: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if choice != AS_SET:
        import veomni_hook

        chosen = veomni_hook.use_kernels(choice)
    script = RECIPES / f"{recipe}.py"
    sys.argv = [str(script), model]
    with chosen:
        return results(runpy.run_path(str(script), run_name="__main__"))


@contextlib.contextmanager
def one_group() -> Iterator[None]:
    """Let recipes that follow each other share a process group: ranks cannot meet twice in torchrun's store."""
    import torch.distributed as dist

    join, leave = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = lambda: dist.is_initialized() or join()
    dist.destroy_process_group = lambda: None
    yield
    leave()


def main() -> None:
    out, model, choices, *recipes = sys.argv[1:]
    several = len(recipes) > 1 or "," in choices
    with one_group() if "RANK" in os.environ and several else contextlib.nullcontext():
        work(out, model, choices, recipes)


def work(out: str, model: str, choices: str, recipes: list[str]) -> None:
    """Run all recipes and write what came of them."""
    found = {
        recipe: {choice: run(recipe, model, choice) for choice in choices.split(",")} for recipe in recipes
    }
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
