"""What serves the concern of a patch here, today: an idiom's kernels, a feature, nothing needed, or not yet.

The table `CONTRACTS` is the one place that says what this package has beside kernels. Keep it true: a feature
that is only planned is `NOT_YET`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from veomni_hook.kernels.selection.registry import built_in
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.tools.migration import vocabulary as words
from veomni_hook.tools.migration.concerns import Concern, concerns

__all__ = [
    "CONTRACTS",
    "HERE",
    "NOT_NEEDED",
    "NOT_YET",
    "PARTLY",
    "STATUSES",
    "Answer",
    "Coverage",
    "answer",
    "coverage",
]

HERE = "here"
PARTLY = "partly"
NOT_YET = "not yet"
NOT_NEEDED = "not needed"
STATUSES = (HERE, PARTLY, NOT_YET, NOT_NEEDED)


@dataclass(frozen=True)
class Answer:
    """What serves one concern of one patch.

    Attributes:
        status: one of `STATUSES`.
        by: routes as ``op/variant``, the feature, what is planned, or why nothing is needed.
        missing: what of the concern nothing here serves, as `migrate` says it of a kept patch; empty if it
            is served, or not needed.
    """

    status: str
    by: str
    missing: str = ""


#: What serves a concern wherever it occurs. `LOSS`, `KERNEL` and the like depend on the routes: see `answer`.
CONTRACTS: Mapping[str, Answer] = {
    words.INDEXER_LOSS: Answer(NOT_YET, "not planned", "a loss that trains the indexer"),
    # Partly: these are features of their own, for the models that they can take, and not VeOmni's API.
    words.SEQUENCE_PARALLEL: Answer(
        PARTLY,
        "`VEOMNI_PARALLEL=sp=2`; towers split by images",
        "sequence parallelism in the groups that VeOmni's runtime makes",
    ),
    words.EXPERT_PARALLEL: Answer(
        PARTLY, "`VEOMNI_PARALLEL=ep=2`", "expert parallelism by VeOmni's runtime and plan"
    ),
    words.FSDP: Answer(
        PARTLY, "`VEOMNI_PARALLEL` shards by FSDP2", "sharding as VeOmni's runtime wraps modules"
    ),
    words.DUMMY_FORWARD: Answer(
        PARTLY,
        "`absent_modality` runs a tower once on its smallest input",
        "the method `dummy_forward`, and the same cost on all ranks of VeOmni's FSDP",
    ),
    words.PACKING: Answer(
        PARTLY,
        "samples are kept apart by `position_ids` or `cu_seq_lens`, or raise an error",
        "packing by the other arguments that VeOmni's collator passes",
    ),
    words.HOST_SYNC: Answer(
        PARTLY,
        "`host_metadata`, and `collate_metadata` in data workers",
        "sizes from the `multimodal_metadata` that VeOmni's collator makes",
    ),
    words.POSITION_IDS: Answer(
        PARTLY,
        "`veomni_hook.multimodal.position_ids`",
        "position ids in the layout, and by the methods, of VeOmni's data workers",
    ),
    words.COLLATOR: Answer(
        PARTLY, "`veomni_hook.multimodal.collate_metadata`", "the methods that VeOmni's collator calls"
    ),
    words.ROUTER_REPLAY: Answer(HERE, "`veomni_hook.routing.record` and `replay`"),
    words.ROUTER_MONITOR: Answer(HERE, "`veomni_hook.routing.monitor`"),
    words.QAT: Answer(NOT_YET, "not planned", "quantisation-aware training"),
    words.ATTENTION_BACKEND: Answer(NOT_NEEDED, "the names are those of VeOmni's own backends"),
    words.NUMERICS: Answer(
        NOT_YET,
        "dtypes and the order of operations are upstream's",
        "this dtype, or this order of operations",
    ),
    words.AUTOGRAD: Answer(NOT_NEEDED, "the fused loss may be changed in place"),
    words.CONFIG_FIX: Answer(NOT_NEEDED, "`VEOMNI_KERNELS` chooses kernels"),
    # Partly: it is a setting, and a config may leave out any other code.
    words.EXCLUSION: Answer(
        PARTLY, "`VEOMNI_SPEECH=0`, for parts that make speech", "leaving out code that makes no speech"
    ),
    words.NO_CHANGE: Answer(NOT_NEEDED, "upstream's code stays as it is"),
    words.OTHER: Answer(NOT_YET, "not recognised", "unknown, because no rule recognises what it is for"),
}

#: Our ops that serve an op, or a slot, of VeOmni. Ops that are not here have no kernel of ours.
OURS: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "rms_norm_gated": ("rms_norm",),
    "rotary_pos_emb": ("rotary", "qk_norm_rotary"),
    "rotary_pos_emb_vision": ("rotary",),
    "swiglu_mlp": ("gated_mlp",),
    "moe_experts": ("moe_experts",),
    "cross_entropy_loss": ("linear_cross_entropy",),
    "cross_entropy_loss/seq_cls": (),
    "load_balancing_loss": ("load_balancing_loss",),
    "causal_conv1d": ("causal_conv",),
    "chunk_gated_delta_rule": ("gated_delta_rule",),
    "mhc": ("hyper_connection",),
    "dsa_attention_implementation": ("attention",),
}
_PLANNED: Mapping[str, str] = {
    "cross_entropy_loss/seq_cls": "upstream's class has one label for each sequence",
    "dsa_indexer_implementation": "`index_scores` computes scores alone, no selection",
    "dsa_attention_implementation": "chosen keys are a mask for torch's attention",
}
#: What is missing of a slot, where that is not just a kernel.
_MISSING: Mapping[str, str] = {
    "cross_entropy_loss/seq_cls": "a loss of classes with a label for each position",
}
_SLOT = re.compile(rf"(?:{words.OP_SLOT}|{words.CONFIG_SLOT}) ([\w/]+)")
_LOG_PROBS = "`loss_options(token_outputs=True)`: fields of the output with gradients, not `fused_linear_aux`"
_AUX = "the payload `fused_linear_aux` of the output"
_OUTPUTS = "log-probabilities are outputs only where the loss is routed"
_RAW_LOGITS = "upstream since 5.9; before: the fix `raw_router_logits`"
_HUB = "kernels of the Hub run only with `use_kernels=True`"


def answer(concern: Concern, routes: Sequence[str]) -> Answer:
    """Return what serves a concern.

    Args:
        concern: the concern of a patch, with its evidence.
        routes: what idioms route to kernels in the code that the patch replaces, as ``op/variant``.
    """
    slots = _SLOT.findall(concern.evidence)
    if concern.name in (words.KERNEL, words.LOSS, words.LOAD_BALANCING) and slots:
        return _of_slots(slots, routes)
    if concern.name == words.KERNEL:
        return _of_kernel(concern, routes)
    if concern.name in (words.LOSS, words.LOG_PROBS):
        loss = _of_slots(("cross_entropy_loss",), routes)
        if concern.name == words.LOSS:
            return loss
        return (
            Answer(PARTLY, _LOG_PROBS, _AUX)
            if loss.status == HERE
            else Answer(NOT_YET, _OUTPUTS, f"log-probabilities in the output, and {_AUX}")
        )
    if concern.name == words.LOAD_BALANCING:
        return Answer(NOT_NEEDED, _RAW_LOGITS)
    return CONTRACTS[concern.name]


def _of_slots(slots: Sequence[str], routes: Sequence[str]) -> Answer:
    """An answer for several slots at once: each is served by a route of one of our ops, or not."""
    serving: list[str] = []
    lacking: list[str] = []
    without: list[str] = []
    for slot in slots:
        op = slot.partition("/")[0]
        ours = OURS.get(slot, OURS.get(op, ()))
        matching = [route for route in routes if route.partition("/")[0] in ours]
        serving += matching
        if not matching:
            without.append(slot)
            planned = _PLANNED.get(slot, _PLANNED.get(op, ""))
            lacking.append(f"{slot}: {planned or 'no route'}" if len(slots) > 1 else planned)
    by = "; ".join(filter(None, (", ".join(dict.fromkeys(serving)), *lacking)))
    if not lacking:
        return Answer(HERE, by)
    missing = " and ".join(_MISSING.get(slot, f"a kernel for {slot}") for slot in without)
    return Answer(PARTLY if serving else NOT_YET, by or "no kernel", missing)


def _of_kernel(concern: Concern, routes: Sequence[str]) -> Answer:
    """An answer for a kernel that is called without a slot."""
    if concern.evidence.startswith("drops "):
        return Answer(NOT_NEEDED, _HUB)
    kernels = [route for route in routes if route.partition("/")[0] in built_in()]
    return Answer(HERE, ", ".join(kernels)) if kernels else Answer(NOT_YET, "no kernel", "a kernel")


@dataclass(frozen=True)
class Coverage:
    """What a patch is for, and what serves each of these concerns; ``answers`` are in the same order."""

    concerns: tuple[Concern, ...]
    answers: tuple[Answer, ...]

    @property
    def complete(self) -> bool:
        """Whether the patch is unnecessary: everything that it is for is here or not needed."""
        return all(one.status in (HERE, NOT_NEEDED) for one in self.answers)

    @property
    def by(self) -> str:
        """What serves the concerns that are served."""
        served = [one.by for one in self.answers if one.status in (HERE, NOT_NEEDED)]
        return ", ".join(dict.fromkeys(filter(None, served)))

    @property
    def left(self) -> list[str]:
        """What is missing, with the concern that needs it, its evidence, and what there is of it."""
        left = []
        for concern, given in zip(self.concerns, self.answers, strict=True):
            if given.status not in (HERE, NOT_NEEDED):
                purpose = "another purpose" if concern.name == words.OTHER else concern.name
                here = f"; here: {given.by}" if given.status == PARTLY else ""
                left.append(f"{given.missing} (for {purpose}: {concern.evidence}{here})")
        return left


def coverage(patch: Patch, config: PatchConfig, ops: Sequence[str], upstream: str | None) -> Coverage:
    """Return what a patch is for, and what of it is served.

    Args:
        patch: the patch.
        config: its config.
        ops: what idioms route inside its target, as ``op/variant``.
        upstream: the module's text in the release that the patch was written for, if it is known.

    Raises:
        ReplacementError: the source of the replacement, or of a helper, cannot be read.
        SyntaxError: ``upstream``, or a block of the config, is not valid Python.
    """
    purposes = concerns(patch, config, upstream)
    return Coverage(purposes, tuple(answer(one, ops) for one in purposes))
