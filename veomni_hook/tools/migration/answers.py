"""What serves the concern of a patch here: the same effect, what is missing, or why it is not wanted.

Kernels are told by the routes in the code that a patch replaces. Everything else was measured, with VeOmni's
patch and with this package on each of its models: `python -m scripts.veomni_effects` writes measured.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from veomni_hook.kernels.selection.registry import built_in
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.tools.migration import vocabulary as words
from veomni_hook.tools.migration.concerns import IDLE, Concern, concerns

__all__ = [
    "BY_DESIGN",
    "MISSING",
    "NUMBERS",
    "RAN",
    "SAME",
    "STATUSES",
    "Answer",
    "Coverage",
    "answer",
    "coverage",
    "measured",
    "releases_measured",
]

SAME = "same effect"
MISSING = "missing"
BY_DESIGN = "by design"
STATUSES = (SAME, MISSING, BY_DESIGN)

#: The keys of measured.json beside concerns: numbers of a step, and the ops that ran in it.
NUMBERS, RAN = "numbers", "ran"


@dataclass(frozen=True)
class Answer:
    """What serves one concern of one patch.

    Attributes:
        status: one of `STATUSES`.
        by: routes as ``op/variant`` or the feature; what is missing; or why it is not wanted.
    """

    status: str
    by: str


#: What serves a concern where it was measured to have the same effect.
FEATURES: Mapping[str, str] = {
    words.LOG_PROBS: "`return_log_probs=True`, `fused_linear_aux`",
    words.SEQUENCE_PARALLEL: "`VEOMNI_PARALLEL=sp=2`",
    words.EXPERT_PARALLEL: "`VEOMNI_PARALLEL=ep=2`",
    words.FSDP: "FSDP2 of upstream's classes",
    words.DUMMY_FORWARD: "`absent_modality` runs a tower once on its smallest input",
    words.PACKING: "samples are kept apart by `position_ids`",
    words.HOST_SYNC: "`host_metadata` and `collate_metadata`: no wait",
    words.POSITION_IDS: "`veomni_hook.multimodal.position_ids`",
    words.COLLATOR: "`veomni_hook.multimodal.collate_metadata`",
    words.ROUTER_REPLAY: "`veomni_hook.routing.record` and `replay`",
    words.ROUTER_MONITOR: "`veomni_hook.routing.monitor`",
    words.EXCLUSION: "`VEOMNI_SPEECH=0`",
    words.NUMERICS: "upstream's own dtypes; for routers the fix `router_in_float32`",
    words.AUTOGRAD: "the fused loss may be changed in place",
    words.CONFIG_FIX: "`VEOMNI_KERNELS` chooses kernels",
    words.NO_CHANGE: "upstream's code stays as it is",
    words.LOAD_BALANCING: "upstream's routers return their logits",
}
#: What is not wanted here.
REASONS: Mapping[str, str] = {
    words.INDEXER_LOSS: "upstream trains no indexer, and its loss would change the model's",
    words.QAT: "rounding of weights belongs to a quantiser, such as torchao's, before or around the model",
    words.ATTENTION_BACKEND: "the names are those of VeOmni's own backends",
    words.NUMERICS: "the order of operations is upstream's: {}",
}
_OF_UPSTREAM = "upstream's code for it runs, the patch's never does"
#: Concerns that are served without a change in the script: no setting, argument or function of this package.
_IN_PLACE = (
    words.KERNEL,
    words.LOSS,
    words.LOG_PROBS,
    words.LOAD_BALANCING,
    words.AUTOGRAD,
    words.CONFIG_FIX,
    words.NO_CHANGE,
)
#: What is not: VeOmni's loss of classes has a label for each position, upstream's one for each sequence.
_LABELS = "cross_entropy_loss/seq_cls"
_OF_POSITIONS, _OF_RUNTIME = "with a label for each position", "by VeOmni's runtime"
#: Concerns that a step of the model measures as a whole.
_BY_NUMBERS = (words.AUTOGRAD, words.CONFIG_FIX, words.NO_CHANGE, words.LOAD_BALANCING)

#: Our ops that serve an op of VeOmni's slots. Ops that are not here have no kernel of ours.
OURS: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "rms_norm_gated": ("rms_norm",),
    "rotary_pos_emb": ("rotary", "qk_norm_rotary"),
    "rotary_pos_emb_vision": ("rotary",),
    "swiglu_mlp": ("gated_mlp",),
    "moe_experts": ("moe_experts",),
    "cross_entropy_loss": ("linear_cross_entropy",),
    "load_balancing_loss": ("load_balancing_loss",),
    "causal_conv1d": ("causal_conv",),
    "chunk_gated_delta_rule": ("gated_delta_rule",),
    "mhc": ("hyper_connection",),
    "dsa_indexer_implementation": ("index_scores",),
    "dsa_attention_implementation": ("attention",),
}
_SLOT = re.compile(rf"(?:{words.OP_SLOT}|{words.CONFIG_SLOT}) ([\w/]+)")


@cache
def _measurements() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """By release and model: what `scripts.veomni_effects` found."""
    text = Path(__file__).with_name("measured.json").read_text(encoding="utf-8")
    releases: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return releases


def releases_measured() -> tuple[str, ...]:
    """Return the releases of transformers that were measured, oldest first."""
    return tuple(sorted(_measurements(), key=Version))


def measured(module: str, release: str) -> Mapping[str, Any] | None:
    """Return what was measured of a model, on the newest release that is not newer; None if nothing was.

    Args:
        module: the modeling module.
        release: the version of transformers.
    """
    known = releases_measured()
    chosen = next((one for one in reversed(known) if Version(one) <= Version(release)), known[0])
    return _measurements()[chosen].get(module.rpartition("modeling_")[2])


def answer(
    concern: Concern, routes: Sequence[str], results: Mapping[str, Any] | None, target: str = ""
) -> Answer:
    """Return what serves a concern.

    Args:
        concern: the concern of a patch, with its evidence.
        routes: what idioms route to kernels in the code that the patch replaces, as ``op/variant``.
        results: what was `measured` of the model.
        target: what the patch replaces.
    """
    if concern.evidence.startswith(IDLE):
        return Answer(BY_DESIGN, _OF_UPSTREAM)
    slots = _SLOT.findall(concern.evidence)
    if concern.name == words.LOSS or (slots and concern.name in (words.KERNEL, words.LOAD_BALANCING)):
        return _of_slots(slots or ("cross_entropy_loss",), routes, results)
    if concern.name == words.KERNEL and concern.evidence.startswith("drops "):
        return Answer(SAME, "kernels of the Hub run only with `use_kernels=True`")
    if concern.name == words.KERNEL:  # one that is called without a slot
        kernels = [route for route in _that_ran(routes, results) if route.partition("/")[0] in built_in()]
        return Answer(SAME, ", ".join(kernels)) if kernels else Answer(MISSING, "no kernel")
    return _of_feature(concern, results, target)


def _of_feature(concern: Concern, results: Mapping[str, Any] | None, target: str) -> Answer:
    """An answer for what is not a kernel, by what was measured."""
    if concern.name not in FEATURES:
        reason = REASONS.get(concern.name)
        return Answer(MISSING, "not recognised") if reason is None else Answer(BY_DESIGN, reason)
    key = NUMBERS if concern.name in _BY_NUMBERS else concern.name
    if results is None or key not in results:
        return Answer(MISSING, f"not measured for this model; {FEATURES[concern.name]} may serve it")
    lack = results[key]
    if concern.name == words.NUMERICS:
        lack = lack.get(target.partition(".")[0], "not measured alone")
    if not lack:
        return Answer(SAME, FEATURES[concern.name])
    reason = REASONS.get(concern.name)
    return Answer(MISSING, lack) if reason is None else Answer(BY_DESIGN, reason.format(lack))


def _of_slots(slots: Iterable[str], routes: Sequence[str], results: Mapping[str, Any] | None) -> Answer:
    """An answer for several slots at once: each is served by a route of one of our ops that ran, or not."""
    ran = _that_ran(routes, results)
    serving: list[str] = []
    lacking: list[str] = []
    for slot in slots:
        op = slot.partition("/")[0]
        matching = [route for route in ran if route.partition("/")[0] in OURS.get(op, ())]
        serving += matching
        if not matching:
            lacking.append(f"no kernel for {slot}")
    if lacking:
        return Answer(MISSING, "; ".join(lacking))
    return Answer(SAME, ", ".join(dict.fromkeys(serving)))


def _that_ran(routes: Sequence[str], results: Mapping[str, Any] | None) -> list[str]:
    """The routes whose op ran in the model; all of them if it was not measured."""
    return [route for route in routes if results is None or route.partition("/")[0] in results[RAN]]


@dataclass(frozen=True)
class Coverage:
    """What a patch is for, and what serves each of these concerns; ``answers`` are in the same order."""

    concerns: tuple[Concern, ...]
    answers: tuple[Answer, ...]

    @property
    def complete(self) -> bool:
        """Whether the patch is unnecessary: everything that it is for is served in its place."""
        return not self.left

    @property
    def by(self) -> str:
        """What serves the concerns that are served."""
        return ", ".join(dict.fromkeys(one.by for one in self.answers if one.status == SAME))

    @property
    def left(self) -> list[str]:
        """What is missing, not wanted, or served in another way, with its concern and evidence."""
        lines = []
        for concern, one in zip(self.concerns, self.answers, strict=True):
            labels = _LABELS in concern.evidence
            if one.status == SAME and concern.name in _IN_PLACE and not labels:
                continue
            said = {
                MISSING: f"{concern.name}: {one.by}",
                BY_DESIGN: f"{concern.name}, by design: {one.by}",
                SAME: f"{concern.name} {_OF_POSITIONS if labels else _OF_RUNTIME}; here by {one.by}",
            }[one.status]
            said = "what no rule recognises" if concern.name == words.OTHER else said
            lines.append(f"{said} ({concern.evidence})")
        return lines


def coverage(
    patch: Patch, config: PatchConfig, ops: Sequence[str], upstream: str | None, release: str
) -> Coverage:
    """Return what a patch is for, and what of it is served.

    Args:
        patch: the patch.
        config: its config.
        ops: what idioms route inside its target, as ``op/variant``.
        upstream: the module's text in the release that the patch was written for, if it is known.
        release: the version of transformers that the patch would be used with.

    Raises:
        ReplacementError: the source of the replacement, or of a helper, cannot be read.
        SyntaxError: ``upstream``, or a block of the config, is not valid Python.
    """
    purposes = concerns(patch, config, upstream)
    results = measured(config.source_module, release)
    return Coverage(purposes, tuple(answer(one, ops, results, patch.target) for one in purposes))
