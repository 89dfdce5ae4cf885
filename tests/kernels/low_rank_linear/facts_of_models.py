"""Prints, as JSON, what adapters of a model do under the hook; one rank of two if RANK is set.

Every fact compares a step with upstream's code with one with ours, of the same model.
"""

# ruff: noqa: E402, I001 - the hook first, or not at all

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
LATE = "late" in sys.argv
if not LATE:
    import veomni_hook.install

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tests.adopt.small import IDS, make
from tests.kernels.dispatched import Operators
from tests.processes import join, leave

import veomni_hook
from veomni_hook.kernels.selection.process_choice import set_choice

OP = "low_rank_linear"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return with_adapters(make().to(dtype), **options)


def with_adapters(model, **options):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear", **options)
    model = get_peft_model(model, config).train()
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.1)
    return model


def step(model, choice):
    set_choice(choice)
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in found.items()}
    return loss.detach(), {name: each.clone() for name, each in whole.items()}


def compared(model):
    """The largest difference, relative to the largest gradient; the number of gradients; what ran."""
    expected, found = step(model, "eager"), step(model, f"eager,{OP}=torch")
    assert expected[1].keys() == found[1].keys()
    largest = max(each.abs().max() for each in expected[1].values())
    off = max((found[1][name] - each).abs().max() / largest for name, each in expected[1].items())
    rows = [row for row in veomni_hook.explain(model).rows if row.op == OP]
    return {
        "difference": max(float(off), abs(float(found[0] - expected[0]))),
        "gradients": len(found[1]),
        "ran": sorted({f"{row.backend}: {row.reason}" for row in rows}),
    }


def tensors_of(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def made_for_frozen(family, choice, trained="nothing"):
    """What a step makes of the shape of a weight without an adapter's; which ops ran. All else is frozen."""
    experts = "moe" in family
    options = {"target_modules": ["q_proj", "v_proj"] if experts else "all-linear"}
    options |= {"target_parameters": EXPERTS} if experts else {}
    model = get_peft_model(make(family), LoraConfig(task_type="CAUSAL_LM", r=3, **options)).train()
    shapes = set()
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.1)
        if "lora_" not in name:
            each.requires_grad_(name.endswith(trained))
            shapes |= {(*each.shape,), (*each.shape[::-1],), (*each.shape[-2:],)}
    set_choice(choice)
    found = set()

    def note(operator, operands, result):
        """Where the result is new memory and has one of the shapes, dimensions of 1 aside."""
        known = {each.untyped_storage().data_ptr() for each in tensors_of(operands)}
        for each in tensors_of(result):
            shape = tuple(size for size in each.shape if size > 1)
            if shape in shapes and each.untyped_storage().data_ptr() not in known:
                found.add(f"{operator.overloadpacket.__name__} {[*shape]}")

    with Operators(note):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    rows = [row for row in veomni_hook.explain(model).rows if row.called and row.backend == choice]
    return {"made": sorted(found), "ran": sorted({row.op for row in rows})}


def merged_and_disabled():
    """The notes about adapters that do not run as such."""
    told = {}

    def note(model, state):
        rows = [row for row in veomni_hook.explain(model).rows if row.op in (OP, "moe_experts")]
        told[state] = sorted({row.note for row in rows})

    set_choice("torch")
    for family, options in (
        ("qwen3", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS}),
    ):
        model = get_peft_model(make(family), LoraConfig(r=4, **options))
        model(input_ids=IDS)
        note(model, family)
        model.merge_adapter()
        model(input_ids=IDS)
        note(model, f"{family} merged")
        model.unmerge_adapter()
        with model.disable_adapter():
            model(input_ids=IDS)
            note(model, f"{family} disabled")
        note(model, f"{family} enabled")
        note(model.merge_and_unload(), f"{family} unloaded")
    return told


def whole_model():
    facts = {"plain": compared(adapted()), "dropout": compared(adapted(lora_dropout=0.2))}
    facts["bfloat16"] = compared(adapted(torch.bfloat16))
    facts["variant"] = compared(adapted(use_dora=True))
    model = adapted()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    facts["checkpointing"] = compared(model)
    facts["keys"] = [*model.state_dict()]
    facts["frozen"] = {family: made_for_frozen(family, "torch") for family in ("qwen3", "qwen3_moe")}
    facts["trained"] = made_for_frozen(
        "qwen3", "torch", ("q_norm.weight", "layers.1.mlp.gate_proj.base_layer.weight")
    )
    facts["notes"] = merged_and_disabled()
    with tempfile.TemporaryDirectory() as folder:
        model = adapted()
        set_choice(f"eager,{OP}=torch")
        expected = model(input_ids=IDS).logits
        model.save_pretrained(folder)
        facts["saved"] = sorted(path.name for path in Path(folder).iterdir())
        again = PeftModel.from_pretrained(make(), folder)
        facts["loaded"] = bool(torch.equal(again(input_ids=IDS).logits, expected))
    merged = model.merge_and_unload()
    facts["merged"] = float((merged(input_ids=IDS).logits - expected).abs().max())
    return facts


def quantised(kind, *, prepared=False):
    """A model of quantised layers, whose own forward runs; ``prepared`` for QLoRA as PEFT does it.

    Then all that is not quantised is float32, and layers are checkpointed.
    """
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = make().to(torch.bfloat16)
    for name, each in list(model.named_modules()):
        if not isinstance(each, torch.nn.Linear) or "lm_head" in name:
            continue
        sizes, weight = (each.in_features, each.out_features), each.weight.data
        if kind == "4bit":
            layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16)
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        else:
            layer = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.to("cpu"))
    setattr(model, f"is_loaded_in_{kind}", True)
    return with_adapters(prepare_model_for_kbit_training(model) if prepared else model)


def adopted():
    """A model of modules that were imported before the hook."""
    model = adapted()
    handle = veomni_hook.activate()
    report = veomni_hook.adopt(model)
    facts = compared(model)
    facts["names"] = sorted({each.kind for each in report.adopted})
    facts["isinstance"] = all(
        isinstance(each, sys.modules["peft.tuners.lora.layer"].Linear)
        for name, each in model.named_modules()
        if name.endswith("q_proj")
    )
    report.undo()
    handle.deactivate()
    return facts


def ranks():
    join()
    facts = {"ddp": compared(DistributedDataParallel(adapted()))}
    policies = {
        "fsdp2": MixedPrecisionPolicy(),
        "fsdp2 bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for name, policy in policies.items():
        model = adapted()
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mp_policy=policy)
        facts[name] = compared(fully_shard(model, mp_policy=policy))
    for part in ("lora_A", "base_layer"):
        model = adapted()
        for name, each in list(model.named_modules()):
            if name.endswith((f"{part}.default", part)) and isinstance(each, torch.nn.Linear):
                fully_shard(each)
        facts[f"fsdp2 of {part}"] = compared(fully_shard(model))
    print(json.dumps(facts))
    leave()


if __name__ == "__main__":
    if LATE:
        found = adopted()
    elif "RANK" in os.environ:
        ranks()
    elif sys.argv[1:]:
        kind = sys.argv[1]
        found = {
            name: compared(quantised(kind, prepared=name == "prepared")) for name in ("plain", "prepared")
        }
    else:
        found = whole_model()
    print(json.dumps(found))
