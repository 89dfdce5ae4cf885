"""Run as a script: for each family, whether rows of a forward pass have the same bits in other batches, as JSON.

Arguments: a dtype, the value of the setting `deterministic`, and families.
"""

import json
import sys

import torch

import veomni_hook

LENGTH, PREFILL = 90, 80
COMMON = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip


def model_of(family):
    import transformers

    others = {
        "n_routed_experts": 32,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    name, sizes = {
        "qwen3": ("Qwen3", {}),
        "llama": ("Llama", {}),
        "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 32}),
        "deepseek_v3": ("DeepseekV3", {**EXPERTS, **LATENT, **others, "num_key_value_heads": 2}),
    }[family]
    common = {key: value for key, value in COMMON.items() if family != "deepseek_v3" or key != "head_dim"}
    config = getattr(transformers, f"{name}Config")(**{**common, **sizes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def bits(family, dtype, device):
    """Return which results equal those of the first sample alone."""
    torch.manual_seed(0)
    model = model_of(family).to(device, dtype)
    ids = torch.randint(1, 512, (3, LENGTH), device=device)
    trained = model.train()(ids, use_cache=False).logits.detach()
    model.eval()
    with torch.no_grad():
        alone = model(ids[:1], use_cache=False).logits
        prefix = model(ids[:, :51], use_cache=False).logits
        step = model(ids[:2, :PREFILL], use_cache=True)
        decoded = [step.logits]
        for at in range(PREFILL, LENGTH):
            step = model(ids[:2, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
            decoded.append(step.logits)
        wide = torch.cat(
            [torch.cat([ids.new_zeros(1, 13), ids[:1]], 1), torch.cat([ids[1:2], ids[2:, :13]], 1)]
        )
        mask = torch.ones_like(wide)
        mask[0, :13] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(wide, attention_mask=mask, position_ids=places, use_cache=False).logits[:1, 13:]
        row = torch.cat([ids[1:2, :37], ids[:1], ids[2:, :5]], 1)
        places = torch.cat([torch.arange(each) for each in (37, LENGTH, 5)])[None].to(device)
        packed = model(row, position_ids=places, use_cache=False).logits[:, 37 : 37 + LENGTH]
        made = model.generate(
            ids[:2], attention_mask=torch.ones_like(ids[:2]), max_new_tokens=5, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        again = model(made.sequences, use_cache=False).logits[:, LENGTH - 1 : -1]
    rolled = torch.stack(made.logits, 1).to(again.dtype)
    with veomni_hook.loss_options(token_outputs=("log_probs",)):
        together = model(ids, labels=ids, use_cache=False).log_probs.detach()
        with torch.no_grad():
            single = model(ids[:1], labels=ids[:1], use_cache=False).log_probs
    return {
        "trained": torch.equal(trained[:1], alone),
        "prefix": torch.equal(prefix[:1], alone[:, :51]),
        "decoded": torch.equal(torch.cat(decoded, 1)[:1], alone),
        "padded": torch.equal(padded, alone),
        "packed": torch.equal(packed, alone),
        "generated": torch.equal(rolled, again),
        "log_probs": torch.equal(together[:1], single),
    }


if __name__ == "__main__":
    kind, mode, *families = sys.argv[1:]
    on = "cuda" if torch.cuda.is_available() else "cpu"
    with veomni_hook.activate(deterministic=mode):
        print(json.dumps({family: bits(family, getattr(torch, kind), on) for family in families}))
