"""Trainer saves and resumes models whose experts are divided among processes.

Applies only where the setting ``parallel`` has ``ep`` above 1.
"""

from __future__ import annotations

from veomni_hook.patches.expert_release import dispatches
from veomni_hook.patches.spec import PatchConfig

__all__ = ["config"]

config = PatchConfig(
    source_module="transformers.trainer",
    description="checkpoints of models whose experts are divided among processes can be resumed",
)

_CALLED = "groups load_best load_model load_optimizer resumes save_model save_optimizer saves"
config.add_import(
    "veomni_hook.parallel.expert_checkpoints", [f"{name} as veomni_{name}" for name in _CALLED.split()]
)
if dispatches():
    config.rewrite(
        "Trainer.__init__",
        pattern="not args.save_only_model",
        replacement="not (args.save_only_model or veomni_resumes(self))",
        description="optimizers of these models can be saved",
    )
    config.rewrite(
        "Trainer.create_optimizer",
        pattern="has_mixed_dtensor({parameters})",
        replacement="(not veomni_resumes(self) and has_mixed_dtensor({parameters}))",
        description="groups are divided below",
    )
else:
    config.rewrite(
        "Trainer.save_model",
        pattern="self.args.should_save",
        replacement="veomni_saves(self)",
        matches=None,
        description="by all processes together",
    )
    config.rewrite(
        "Trainer.save_model",
        pattern="self._save(output_dir)",
        replacement="veomni_save_model(self, output_dir)",
        matches=None,  # from 5.20 on also for models that transformers has divided itself
        description="whole weights, written by one process",
    )
config.rewrite(
    "Trainer.create_optimizer",
    pattern="optimizer_cls({groups}, **{options})",
    replacement="optimizer_cls(veomni_groups(self, {groups}), **{options})",
    description="experts have groups of their own; a checkpoint has those of one process",
)
config.rewrite(
    "Trainer._save_checkpoint",
    pattern="self._save_optimizer_and_scheduler({folder})",
    replacement="veomni_save_optimizer(self, {folder})",
    description="by all processes together",
)
config.rewrite(
    "Trainer._prepare_for_training",
    pattern="self._load_optimizer_and_scheduler({folder})",
    replacement="veomni_load_optimizer(self, {folder})",
    description="by all processes together",
)
config.rewrite(
    "Trainer.train",
    pattern="self._load_from_checkpoint({folder})",
    replacement="veomni_load_model(self, {folder})",
    description="each process reads its part",
)
config.rewrite(
    "Trainer._finalize_training",
    pattern="self._load_best_model()",
    replacement="veomni_load_best(self)",
    description="likewise, with load_best_model_at_end",
)
