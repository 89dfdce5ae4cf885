"""A process that trains small models: `python -m tests.memory.facts_of_models [checkpointed]`.

Printed of each, as JSON: the losses, a digest of all gradients (of what training changed, where a library
trains), their norms, how many layers are checkpointed, what ran in parts, and how many blocks of host memory
there were. The setting is the environment's; ``checkpointed``: the script enables checkpoints itself.
"""

import hashlib
import json
import sys
import tempfile
from collections import Counter

import torch

from tests.multimodal import families

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 64,
}  # fmt: skip
CHECKPOINTED = "checkpointed"
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "output_router_logits": True,
}
SIGHT = {
    "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
PACKED, BFLOAT16 = "Trainer with its checkpoints and packed samples", "Trainer in bfloat16"
#: Norms behind the MLP; experts; layers in a list of their own function; dropout; towers whose features go to
#: several layers, leave them in front of the last, or see each other; what libraries train.
MODELS = {
    "llama": {},
    "gemma2": {"sliding_window": 8},
    "qwen3_moe": EXPERTS,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
    "llama with LoRA": {},
    "qwen3_vl": {
        **families.FAMILIES["qwen3_vl"][1],
        "text_config": families.FAMILIES["qwen3_vl"][1]["text_config"] | {"intermediate_size": 80},
        "vision_config": families.FAMILIES["qwen3_vl"][1]["vision_config"] | {"intermediate_size": 40},
    },
    "llava": {
        "text_config": SMALL | {"model_type": "llama"},
        "vision_config": SIGHT | {"model_type": "clip_vision_model"},
        "image_token_index": families.IMAGE,
    },
    "gemma3": {
        "text_config": SMALL | {"sliding_window": 8, "query_pre_attn_scalar": 8},
        "vision_config": SIGHT,
        "image_token_index": families.IMAGE,
        "mm_tokens_per_image": 4,
    },
    **{f"llama by {trainer}": {} for trainer in ("accelerate", "Trainer", PACKED, BFLOAT16)},
}  # fmt: skip
#: Tokens of an image; 0: of each image its own number.
PICTURES = {"qwen3_vl": 0, "llava": 16, "gemma3": 4}
#: How often what ran in parts.
NOTED = Counter()


def model_of(name, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, _, more = name.partition(" ")
    torch.manual_seed(0)
    owner = AutoModelForImageTextToText if kind in PICTURES else AutoModelForCausalLM
    fields = {} if kind in PICTURES or kind == "gpt2" else SMALL
    model = owner.from_config(AutoConfig.for_model(kind, **fields | MODELS[name] | changes))
    if more == "with LoRA":
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
    if CHECKPOINTED in sys.argv:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batches_of(name, model):
    """One with padding, one whose samples share a row; or with pictures."""
    generator = torch.Generator().manual_seed(1)
    if name == "qwen3_vl":
        images = families.batch(name, families.BATCHES["images"])
        return [families.accepted(model, images)]
    ids = torch.randint(1, 90, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    if name in PICTURES:
        ids[:, 2 : 2 + PICTURES[name]] = families.IMAGE
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": (ids == families.IMAGE).int(),
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": ids,
        }
        return [families.accepted(model, batch)]
    positions = torch.cat([torch.arange(7), torch.arange(17)])[None]
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": ids},
        {"input_ids": ids[:1], "position_ids": positions, "labels": ids[:1], "use_cache": False},
    ]


def stepped(name, model):
    """Return losses, and the gradients of all batches together."""
    batches = batches_of(name, model)
    plain = {key: x for key, x in batches[0].items() if key != "attention_mask"}
    model(**plain).loss.backward()
    model.zero_grad()
    torch.manual_seed(2)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(model, train, *operands):
    """Return losses, and what two steps of SGD, of two batches each, change of the weights."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 96, (24,), generator=generator).tolist() for _ in range(8)]
    losses = train(model, [{"input_ids": row, "labels": row} for row in rows], *operands)
    return losses, {name: p.detach() - before[name] for name, p in model.named_parameters()}


def by_trainer(model, rows, name):
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    packed = name == PACKED
    if packed:
        rows = [{key: values[: 24 - place] for key, values in row.items()} for place, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1.0, optim="sgd", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            gradient_checkpointing=packed or CHECKPOINTED in sys.argv, bf16=name == BFLOAT16,
        )  # fmt: skip
        more = {"data_collator": DataCollatorWithFlattening()} if packed else {}
        trainer = Trainer(model, arguments, train_dataset=rows, **more)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_accelerate(model, rows):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = [{key: torch.tensor(values) for key, values in row.items()} for row in rows]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), torch.utils.data.DataLoader(data, batch_size=2)
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def facts(name):
    from veomni_hook.memory import host

    model = model_of(name)
    _, _, trainer = name.partition(" by ")
    NOTED.clear()
    if trainer == "accelerate":
        losses, values = trained(model, by_accelerate)
    elif trainer:
        losses, values = trained(model, by_trainer, trainer)
    else:
        losses, values = stepped(name, model)
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    blocks = host.BLOCKS.held
    host.BLOCKS.release()
    ids = torch.ones(1, 2, dtype=torch.long)
    embedded = model.get_input_embeddings()(ids)
    return {
        "losses": losses,
        "digest": hashlib.sha256(b"".join(x.numpy().tobytes() for x in values.values())).hexdigest(),
        "norms": {name: x.norm().item() for name, x in values.items()},
        "checkpointed": len(layers),
        "parts": dict(NOTED),
        "blocks": blocks,
        "left": host.BLOCKS.held,
        "leaf": embedded.requires_grad and embedded.is_leaf,
    }


def note(owner, name, label):
    """Count calls of a method, by what it is called with."""
    method = getattr(owner, name)

    def noting(self, operand):
        NOTED[label(self, operand)] += 1
        return method(self, operand)

    setattr(owner, name, noting)


def make_small():
    """Let small tensors go to the host, and few rows be many."""
    from veomni_hook.memory import attention, heads, host, offload, tiles

    note(tiles._Call, "run", lambda call, _: type(call.module).__name__)
    note(attention._Recorded, "join", lambda _, outputs: "heads")
    host.BLOCK = offload.BLOCK = 4096
    offload.LEAST = tiles.LEAST = tiles.MULTIPLE = 1
    heads.ROWS = tiles.MOST = 16


def main():
    import veomni_hook.install  # noqa: F401

    make_small()
    print(json.dumps({name: facts(name) for name in MODELS}))


if __name__ == "__main__":
    main()
