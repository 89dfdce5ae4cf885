"""TRL's GRPO and RLOO: processes that share sequences train on the completions of the first of them.

Prompts, rewards, advantages and logs are shared out by groups. Applies only where the setting ``parallel``
has ``sp`` above 1. A trainer or a release of another form stays as it is: if its processes then train on
other completions, that is an error (`veomni_hook.parallel.agreement`).
"""

from __future__ import annotations

from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="trl.trainer.[gr][rl][po]o_*",  # grpo_ and rloo_, of trainers and their configs
    description="processes that share sequences train on the same completions",
)

_LOADER = "self.accelerator.gradient_state.active_dataloader"
_GENERATE, _SCORE = "*._generate", "*._generate_and_score_completions"

config.add_import(
    "veomni_hook.parallel.data",
    [
        *("of_first as veomni_of_first", "of_group as veomni_of_group", "once as veomni_once"),
        *("part_of as veomni_part_of", "shares as veomni_shares"),
    ],
)
for target, pattern, replacement, description in (
    (
        "*Config.__post_init__",
        "self.per_device_train_batch_size * {processes}",
        "self.per_device_train_batch_size * veomni_shares({processes})",
        "how many completions there are at a time",
    ),
    (
        _SCORE,
        "self._generate({prompts})",
        f"veomni_of_group(self._generate({{prompts}}), {_LOADER})",
        "the completions of the first process of a group",
    ),
    (
        _SCORE,
        "slice(self.accelerator.process_index * {count}, (self.accelerator.process_index + 1) * {count})",
        f"veomni_part_of(self.accelerator.process_index, {{count}}, {_LOADER})",
        "which advantages belong to this process",
    ),
    *(
        (target, "gather({results})", f"veomni_once(gather({{results}}), {_LOADER})", "each result once")
        for target in ("*._calculate_rewards", _SCORE)
    ),
    (
        _GENERATE,
        "self.accelerator.gather({results})",
        f"veomni_once(self.accelerator.gather({{results}}), {_LOADER})",
        "numbers of tokens, each once",
    ),
    (
        _SCORE,
        "gather_object({results})",
        f"gather_object(veomni_of_first({{results}}, {_LOADER}))",
        "logs, each line once",
    ),
):
    config.rewrite(target, pattern=pattern, replacement=replacement, matches=None, description=description)
