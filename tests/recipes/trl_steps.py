"""Train with TRL for some steps and write what each step computed, as JSON.

`main` takes ``OUT MODEL CASE...``: each case in `CASES` once, with the settings of the environment; of several
processes the first one writes. With the setting `memory`, what ran in parts, and how many blocks of host memory
there were.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tests.memory import facts_of_models

STEPS = 20
#: What Trainer logs of a step that time and memory do not change.
TIMED = ("step_time", "epoch", "learning_rate", "total_flos", "runtime", "per_second")


def common(name: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": name, "bf16": False, "use_cpu": True, "max_steps": STEPS, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4, "disable_tqdm": True, **more,
    }  # fmt: skip


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def dpo(model: str, *, peft: bool = False, **more: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    words = [text.split() for text in list(topics.values())[:64]]
    pairs = [
        {
            "prompt": " ".join(each[:20]),
            "chosen": " " + " ".join(each[20:32]),
            "rejected": " " + " ".join(each[40:60]),
        }
        for each in words
    ]
    args = DPOConfig(**common("dpo", max_length=128, **more))
    return DPOTrainer(
        model, args=args, train_dataset=Dataset.from_list(pairs), peft_config=adapter() if peft else None
    )


def many_different_letters(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def places(prompts: list[str]) -> range:
    """Numbers for the prompts of this process: those of one process that had all of a step."""
    import veomni_hook.parallel

    index, _ = veomni_hook.parallel.data_shard()
    return range(index * len(prompts), (index + 1) * len(prompts))


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that need no random numbers, of other lengths; a process that is no first one has its own."""
    import veomni_hook.parallel

    wrong = int(os.environ.get("RANK", "0")) % (
        int(os.environ.get("WORLD_SIZE", "1")) // veomni_hook.parallel.data_shard()[1]
    )
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [
            [9 + 7 * place + wrong, 5, 11 + place] * (1 + place % 2) for place in places(prompts)
        ],
        "logprobs": None,
        "wrong": [wrong] * len(prompts),
    }


def by_place(prompts: list[str], wrong: list[int], **kwargs: Any) -> list[float]:
    """Rewards that differ within a prompt's completions, also between the processes of a group."""
    return [float(place % 3 + other) for place, other in zip(places(prompts), wrong, strict=True)]


def online(
    model: str,
    kind: str = "GRPO",
    rewards: Any = many_different_letters,
    *,
    rollout: Any = None,
    peft: bool = False,
    **more: Any,
) -> Any:
    import trl
    from datasets import Dataset

    prompts = Dataset.from_list([{"prompt": text[:60]} for text in list(topics.values())[:64]])
    options = common(kind, num_generations=4, max_completion_length=8, **more)
    return getattr(trl, f"{kind}Trainer")(
        model,
        reward_funcs=rewards,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=prompts,
        peft_config=adapter() if peft else None,
        **({"rollout_func": rollout} if rollout else {}),
    )


def sft(model: str, *, letters: int = 300, **more: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": text[:letters]} for text in list(topics.values())[:80]])
    return SFTTrainer(model, args=SFTConfig(**common("sft", max_length=64, **more)), train_dataset=texts)


CASES: dict[str, Callable[[str], Any]] = {
    "dpo": dpo,
    "dpo-weighted": lambda model: dpo(model, use_weighting=True, gradient_checkpointing=False),
    "dpo-adapter": lambda model: dpo(model, peft=True, learning_rate=1e-2),
    "grpo": lambda model: online(model, beta=0.1, temperature=0.8, num_iterations=2),
    "grpo-entropies": lambda model: online(model, top_entropy_quantile=0.5, entropy_coef=0.01),
    "rloo": lambda model: online(model, "RLOO", beta=0.1, num_iterations=2, steps_per_generation=2),
    "sft": sft,
    "sft-packed": lambda model: sft(model, letters=60, packing=True, gradient_checkpointing=False),
    "grpo-adapter": lambda model: online(model, peft=True, beta=0.1, temperature=1.2, learning_rate=1e-2),
}
#: The completions of a prompt in one process, and in two groups.
APART: dict[str, Callable[[str], Any]] = {
    "whole": lambda model: online(model, rewards=by_place, rollout=rollout),
    "apart": lambda model: online(model, rewards=by_place, rollout=rollout, per_device_train_batch_size=2),
}


def trained(case: str, model: str) -> dict[str, Any]:
    """Train and return the loss of each step, unrounded, what TRL logged, and what `explain` says."""
    import veomni_hook
    from veomni_hook.memory import host

    facts_of_models.NOTED.clear()
    host.BLOCKS.release()
    trainer = (CASES | APART)[case](model)
    losses: list[float] = []
    compute = trainer.compute_loss

    def noted(*given: Any, **named: Any) -> Any:
        loss = compute(*given, **named)
        if trainer.model.training:
            losses.append(float(loss[0] if isinstance(loss, tuple) else loss))
        return loss

    trainer.compute_loss = noted
    trainer.train()
    logged = [
        {name: value for name, value in entry.items() if not any(each in name for each in TIMED)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {
        "losses": losses,
        "logged": logged,
        "explanation": str(veomni_hook.explain(trainer.model)),
        "parts": sorted(facts_of_models.NOTED),
        "blocks": host.BLOCKS.held,
    }


def main() -> None:
    import veomni_hook.install  # noqa: F401 - before trl and transformers

    facts_of_models.make_small()
    out, model, *cases = sys.argv[1:]
    found = {case: trained(case, model) for case in cases}
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")
