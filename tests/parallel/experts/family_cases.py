"""Cases of the families that other tools have to patch by hand, from their loading to a saved checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tests.multimodal import families
from tests.parallel import small
from tests.parallel.experts import models
from veomni_hook.parallel import clip_grad_norm_, data_shard, process

_SPARSE: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 4, "hc_mult": 2, "sliding_window": 8, "partial_rotary_factor": 0.5,
    "vocab_size": 48, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}  # fmt: skip
#: With an image in every batch: towers are sharded, so all ranks run them.
_SEEN = [[("text", 3), ("image", (1, 4, 6)), ("text", 4)], [("text", 9)]]


def _model(family: str) -> Any:
    if family in families.FAMILIES:
        return families.model(family)
    if family == "deepseek_v4":
        torch.manual_seed(0)
        return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**_SPARSE)).train()
    return small.model(family)


def _batch(model: Any, family: str, number: int) -> dict[str, Any]:
    if family not in families.FAMILIES:
        return small.batch("plain", 12 + number)
    return families.accepted(model, families.batch(family, [[*_SEEN[0], ("text", 2 + number)], _SEEN[1]]))


def steps(folder: Path, family: str) -> dict[str, float]:
    """Three steps of AdamW: losses, norms, gradients and weights against one process; and saved, loaded again."""
    path, (index, count) = folder / family, data_shard()
    models.set_choice(models.UPSTREAM)
    model = _model(family)
    process.tell(
        os.environ["VEOMNI_PARALLEL"]
    )  # the first import of a model tells the settings of the server
    kind, batches = type(model), [_batch(model, family, number) for number in range(count)]
    if dist.get_rank() == 0:
        model.save_pretrained(path)
    dist.barrier()
    with models.told(""):
        alone = kind.from_pretrained(path).train()
        norms, _ = models.steps(alone, batches, torch.nn.utils.clip_grad_norm_, 3)
        loss, expected = alone(**batches[index]).loss.item(), models.gradients(alone)
    models.set_choice(models.OURS)
    model = kind.from_pretrained(path).train()
    found, _ = models.steps(model, [batches[index]], clip_grad_norm_, 3)
    gradients = models.gradients(model)
    for name in gradients.keys() - expected.keys():  # of a tower without data, which all ranks run
        assert not gradients.pop(name).any()
    # Some are zero but for rounding: what counts is a thousandth of the greatest of all.
    least = max(float(of.abs().max()) for of in expected.values()) / 1000
    far = {
        name: float((gradients[name] - of).abs().max() / of.abs().max().clamp(min=least))
        for name, of in expected.items()
    }
    weights = models.apart(models.parameters(model), models.parameters(alone))
    answer = {
        "norms": max(abs(one - other) / other for one, other in zip(found, norms, strict=True)),
        "loss": abs(model(**batches[index]).loss.item() - loss) / loss,
        "gradients": max(far.values()),
        "weights": max(weights.values()),
    }
    model.save_pretrained(folder / f"{family} saved")
    with models.told(""):
        again = kind.from_pretrained(folder / f"{family} saved")
    saved = models.apart(models.parameters(again), models.parameters(model))
    divided = models.apart(
        models.parameters(kind.from_pretrained(folder / f"{family} saved")), models.parameters(model)
    )
    return answer | {"saved": max(saved.values()), "divided again": max(divided.values())}
