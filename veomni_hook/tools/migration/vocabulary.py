"""Names of VeOmni's and transformers' public API, and the concern that each stands for.

This is the only place of `migration` that has such names. `concerns` reads the rest from the code of a patch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KERNEL = "kernel"
LOSS = "loss"
LOG_PROBS = "log-probs"
LOAD_BALANCING = "load-balancing loss"
INDEXER_LOSS = "indexer loss"
SEQUENCE_PARALLEL = "sequence parallel"
EXPERT_PARALLEL = "expert parallel"
FSDP = "FSDP"
DUMMY_FORWARD = "dummy forward"
PACKING = "packing"
HOST_SYNC = "host sync"
POSITION_IDS = "position ids"
COLLATOR = "collator"
ROUTER_REPLAY = "router replay"
ROUTER_MONITOR = "router monitor"
QAT = "quantisation-aware training"
ATTENTION_BACKEND = "attention backend"
NUMERICS = "numerics"
AUTOGRAD = "autograd"
CONFIG_FIX = "config fix"
EXCLUSION = "exclusion"
NO_CHANGE = "no change"
OTHER = "other"

#: Every concern, in the order of tables, with what it means.
MEANINGS: Mapping[str, str] = {
    KERNEL: "a fused kernel instead of upstream's formula",
    LOSS: "a fused linear cross-entropy that does not store the logits",
    LOG_PROBS: "log-probabilities and entropy of the labels in the model's output",
    LOAD_BALANCING: "the auxiliary loss of a mixture of experts",
    INDEXER_LOSS: "a loss that trains the indexer of sparse attention",
    SEQUENCE_PARALLEL: "one sequence over several ranks: Ulysses, context parallelism",
    EXPERT_PARALLEL: "experts over several ranks",
    FSDP: "how parameters are sharded and wrapped",
    DUMMY_FORWARD: "a tower takes part on ranks whose batch has no image, video or audio",
    PACKING: "several samples in one row, without padding",
    HOST_SYNC: "fewer reads of device values by the host",
    POSITION_IDS: "position ids made by data workers, or in another layout",
    COLLATOR: "how a batch is collated",
    ROUTER_REPLAY: "experts chosen as in an earlier forward pass",
    ROUTER_MONITOR: "the load of the experts is recorded",
    QAT: "weights and activations are rounded as if quantised",
    ATTENTION_BACKEND: "further attention backends",
    NUMERICS: "another dtype or another order of operations",
    AUTOGRAD: "no operation in place where autograd forbids it",
    CONFIG_FIX: "the model's configuration is changed",
    EXCLUSION: "code that training does not need is left out",
    NO_CHANGE: "upstream's code as it is",
    OTHER: "not recognised",
}

#: Classes whose objects are slots.
OP_SLOT, CONFIG_SLOT = "OpSlot", "OpsConfigSlot"
#: Ops of slots that are not (only) kernels. An expert op also sends tokens to the ranks of their experts.
OPS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy_loss": (LOSS,),
    "load_balancing_loss": (LOAD_BALANCING,),
    "moe_experts": (KERNEL, EXPERT_PARALLEL),
    "qat_implementation": (QAT,),
}

#: Names whose module says too little.
NAMES: Mapping[str, str] = {
    "MoeModelOutputWithIndexerKL": INDEXER_LOSS,
    "reduce_sequence_parallel_loss": INDEXER_LOSS,
    "sparse_mqa_target_fwd": INDEXER_LOSS,
    "get_parallel_state": "",  # its attributes say what for
    "get_device_id": "",
    "precompute_varlen_metadata": HOST_SYNC,  # once a step, not once a layer
    "CompressedCandidates": "",
}

#: What a patch imports from, most specific first. A relative import has only its last part.
MODULES: Mapping[str, str] = {
    "veomni.ops.qat": QAT,
    "veomni.ops.dispatch": "",
    "veomni.ops": KERNEL,
    "liger_kernel": KERNEL,
    "torch_npu": KERNEL,
    "fla": KERNEL,
    "veomni.distributed.sequence_parallel": SEQUENCE_PARALLEL,
    "veomni.distributed.context_parallel": SEQUENCE_PARALLEL,
    "veomni.distributed.parallel_plan": EXPERT_PARALLEL,
    "parallel_plan": EXPERT_PARALLEL,
    "veomni.distributed.moe": EXPERT_PARALLEL,
    "veomni.utils.moe_router_replay": ROUTER_REPLAY,
    "veomni.utils.moe_monitor": ROUTER_MONITOR,
    "veomni.utils.model_outputs": LOG_PROBS,
    "veomni.models.transformers.masking_utils": PACKING,
    "veomni.models.transformers.attention_utils": PACKING,
    "packed_utils": PACKING,
}

#: Methods that VeOmni calls by name: what a patch that adds one is for.
METHODS: Mapping[str, str] = {
    "get_parallel_plan": EXPERT_PARALLEL,
    "dummy_forward": DUMMY_FORWARD,
    "get_position_id_func": POSITION_IDS,
    "get_rope_index": POSITION_IDS,
    "get_metadata_collate_func": HOST_SYNC,
    "get_extra_collate_infos": COLLATOR,
}

#: Identifiers, names of keyword arguments and keys. One counts only if upstream's body does not have it.
WORDS: Mapping[str, re.Pattern[str]] = {
    SEQUENCE_PARALLEL: re.compile(
        r"(?:sp|cp|ulysses)_(?:enabled|group|rank|size)|\w*ulysses\w*|async_enabled"
    ),
    EXPERT_PARALLEL: re.compile(r"ep_(?:enabled|group|rank|size)"),
    DUMMY_FORWARD: re.compile(r"dummy_forward"),
    FSDP: re.compile(r"_no_split_modules|\w*fsdp_shard\w*"),
    PACKING: re.compile(r"(?:linear_attn_)?cu_seq_?lens(?:_list)?_[qk]|packed_\w+|\w*varlen\w*|VARLEN\w*"),
    HOST_SYNC: re.compile(
        r"multimodal_metadata|vit_metadata|\w*max_seqlen\w*|cu_seqlens_list\w*|chunk_indices\w*"
    ),
    ATTENTION_BACKEND: re.compile(r"veomni_flash_attention\w*"),
}

#: Methods and functions whose result the host needs.
HOST_READS = re.compile(
    r"tolist|item|nonzero|numel|all|any|get_vision_\w+|get_audio_\w+|chunk_and_pad_features"
)
#: Decorators of transformers that put a kernel of the Hub, or another implementation, in a body's place.
HUB_DECORATORS = re.compile(
    r"use_kernel_forward_from_hub|use_kernel_func_from_hub|use_experts_implementation"
)


def of_module(module: str, name: str) -> str:
    """Return the concern that a name imported from a module stands for; empty if it stands for none."""
    if name in NAMES:
        return NAMES[name]
    for known, concern in MODULES.items():
        if f"{module}.".startswith(f"{known}.") or module.rpartition(".")[2] == known:
            return concern
    return ""
