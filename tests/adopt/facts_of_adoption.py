"""Prints, as JSON, what adopting loaded models does; run by test_adopt.py in a process of its own."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import json
import os
import pickle
import tempfile
import textwrap
import warnings

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

import veomni_hook
from tests.adopt.small import FAMILIES, IDS, SIZES, difference, make, ran, step
from veomni_hook.errors import VeomniHookError

facts: dict[str, object] = {}


def error_of(act):
    try:
        act()
    except VeomniHookError as error:
        return f"{type(error).__name__}: {error}"
    return None


class Mine(Qwen3ForCausalLM):
    """A user's subclass."""

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


class Wrapper(nn.Module):
    """As PEFT's and DDP's do, holds the model inside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


models = {family: make(family) for family in FAMILIES if family != "qwen2"}
other = make()
before = {family: step(model) for family, model in models.items()}
hooked = make()
seen: list[str] = []
hooked.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
mine = Mine(make().config).train()
mine.load_state_dict(make().state_dict())

os.environ["VEOMNI_HOOK"] = "0"
facts["switched off"] = repr(veomni_hook.adopt(other))
del os.environ["VEOMNI_HOOK"]
facts["off"] = error_of(lambda: veomni_hook.adopt(other))
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    handle = veomni_hook.activate()
facts["late"] = [str(each.message) for each in warned if "adopt(model)" in str(each.message)]
warnings.simplefilter("ignore")

reports = {}
for family, model in models.items():
    identities = [(name, id(each)) for name, each in model.named_parameters(remove_duplicate=False)]
    keys = list(model.state_dict())
    reports[family] = report = veomni_hook.adopt(model)
    after = step(model)
    explanation = veomni_hook.explain(model)
    facts[family] = {
        "difference": difference(before[family], after),
        "ran": ran(explanation),
        "text": repr(report),
        "report": report.to_dict(),
        "same parameters": identities
        == [(n, id(e)) for n, e in model.named_parameters(remove_duplicate=False)],
        "same keys": keys == list(model.state_dict()),
        "same classes by name": type(model).__module__ == FAMILIES[family][1].__module__
        and type(model).__qualname__ == FAMILIES[family][1].__qualname__,
        "isinstance": isinstance(model, FAMILIES[family][1]),
    }

model = models["qwen3"]
facts["other"] = {
    "class": type(other) is Qwen3ForCausalLM,
    "module": modeling_qwen3.Qwen3ForCausalLM is Qwen3ForCausalLM,
    "rows": len(veomni_hook.explain(other).rows),
    "difference": difference(before["qwen3"], step(other)),
}
report = veomni_hook.adopt(hooked)
facts["hooked"] = {
    "difference": difference(before["qwen3"], step(hooked)),
    "seen": seen,
    "reasons": [row.reason for row in veomni_hook.explain(hooked).rows if row.op == "add_rms_norm"],
}
copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
shallow = copy.copy(model.model.norm)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).train()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    whole = torch.load(buffer, weights_only=False)
facts["copies"] = {
    "deepcopy": type(copied) is type(model) and copied.lm_head.weight is not model.lm_head.weight,
    "tied": copied.lm_head.weight is copied.model.embed_tokens.weight,
    "deepcopy ran": ran(veomni_hook.explain(copied)) == {} and difference(before["qwen3"], step(copied)),
    "deepcopy kernels": ran(veomni_hook.explain(copied)),
    "shallow": type(shallow) is type(model.model.norm) and shallow.weight is model.model.norm.weight,
    "pickled": type(pickled) is Qwen3ForCausalLM and difference(before["qwen3"], step(pickled)),
    "torch.save": type(whole) is Qwen3ForCausalLM,
    "loaded": type(loaded) is Qwen3ForCausalLM and difference(before["qwen3"], step(loaded)),
    "imported": b"veomni" in pickle.dumps(model),
}
with torch.no_grad():
    held, there = other.eval(), model.eval()
    facts["generated"] = torch.equal(
        held.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False),
        there.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False),
    )
    model.train()
    states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    facts["hidden states"] = len(states)

veomni_hook.bind(model, "eager")
step(model)
facts["bound"] = {row.backend for row in veomni_hook.explain(model).rows} == {"eager"}
facts["again"] = veomni_hook.adopt(model).to_dict()

veomni_hook.adopt(mine)
facts["mine"] = {
    "difference": difference(before["qwen3"], step(mine)),
    "calls": mine.calls,
    "ran": ran(veomni_hook.explain(mine)),
    "isinstance": isinstance(mine, Mine),
}
wrapped = Wrapper(make())
veomni_hook.adopt(wrapped)
step(wrapped)
facts["wrapped"] = ran(veomni_hook.explain(wrapped))

facts["status"] = {name: outcome.state for name, outcome in handle.status().modules.items()}

# What stands in the way of single modules.
odd = make()
layer = odd.model.layers[0]
layer.mlp.forward = type(layer.mlp).forward.__get__(layer.mlp)
nn.utils.parametrizations.weight_norm(odd.model.layers[1].input_layernorm, dim=None)
report = veomni_hook.adopt(odd)
facts["odd"] = {
    "refused": [(each.kind, each.first, each.reason) for each in report.refused],
    "adopted": sum(each.count for each in report.adopted),
    "difference": abs(before["qwen3"][0] - odd(input_ids=IDS, labels=IDS).loss.item()),
}
facts["nothing"] = error_of(lambda: veomni_hook.adopt(nn.Linear(2, 2)))
facts["no module"] = error_of(lambda: veomni_hook.adopt("model"))

# Deactivated, the patched code falls through to upstream's; undone, the classes are the former ones.
handle.deactivate()
facts["deactivated"] = {
    "difference": difference(before["llama"], step(models["llama"])),
    "ran": ran(veomni_hook.explain(models["llama"])),
}
handle = veomni_hook.activate()
reports["llama"].undo()
reports["llama"].undo()
facts["undone"] = {
    "class": type(models["llama"]) is FAMILIES["llama"][1],
    "rows": len(veomni_hook.explain(models["llama"]).rows),
    "same": difference(before["llama"], step(models["llama"])),
}
again = veomni_hook.adopt(models["llama"])
facts["adopted anew"] = bool(again)
models["llama"].model.norm.__class__ = type("Sharded", (type(models["llama"].model.norm),), {})
facts["not undone"] = error_of(again.undo)
facts["others undone"] = type(models["llama"]) is FAMILIES["llama"][1]

# What others have put into classes stays, also where models of the class were adopted before.
rotary, mlp = modeling_qwen3.Qwen3Attention.forward, modeling_qwen3.Qwen3MLP


def others(self, *args, **kwargs):
    return rotary(self, *args, **kwargs)


functools.update_wrapper(others, rotary)
modeling_qwen3.Qwen3Attention.forward = others
held = make()
modeling_qwen3.Qwen3MLP = nn.Identity
report = veomni_hook.adopt(held)
facts["replaced"] = {
    "refused": {each.kind: each.reason for each in report.refused},
    "adopted": sorted(each.kind for each in report.adopted),
    "difference": difference(before["qwen3"], step(held)),
}
modeling_qwen3.Qwen3Attention.forward, modeling_qwen3.Qwen3MLP = rotary, mlp

# What users patch: a method is taken over, a constructor and a function of the module are not.
config = veomni_hook.PatchConfig(source_module=modeling_qwen2.__name__)


@config.override_method("Qwen2MLP.forward")
def forward(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    self.above = super().forward.__name__
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@config.modify_init("Qwen2RMSNorm")
def init(original_init, self, *args, **kwargs):
    original_init(self, *args, **kwargs)
    self.mark = 1


@config.replace_function("rotate_half")
def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


veomni_hook.register(config)
patched = make("qwen2")
first = step(patched)
upstream_function = modeling_qwen2.rotate_half
report = veomni_hook.adopt(patched)
facts["config"] = {
    "text": repr(report),
    "difference": difference(first, step(patched)),
    "calls": patched.model.layers[0].mlp.calls,
    "above": patched.model.layers[0].mlp.above,
    "function": modeling_qwen2.rotate_half is upstream_function,
    "refused": {each.kind: each.reason for each in report.refused},
}

# A model whose module was imported while the hook was active has nothing to adopt.
from transformers import MistralConfig, MistralForCausalLM  # noqa: E402

report = veomni_hook.adopt(MistralForCausalLM(MistralConfig(**SIZES)))
facts["imported patched"] = [bool(report), sorted({each.reason for each in report.before})]

# An edited source of an adopted method, which still has the guard.
mine = make("qwen3")
veomni_hook.adopt(mine)
kind = type(mine.model.layers[0].mlp)
source = textwrap.dedent(inspect.getsource(kind.forward))
exec(source.replace("return down_proj", "return 3 * down_proj"), scope := dict(vars(modeling_qwen3)))
first = step(mine)
kind.forward = scope["forward"]
facts["edited"] = {
    "difference": difference(first, step(mine)),
    "reasons": [row.reason for row in veomni_hook.explain(mine).rows if row.op == "gated_mlp"],
}

print(json.dumps(facts))
