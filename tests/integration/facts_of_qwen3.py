"""Prints, as JSON, what introspection says about every class and function of the installed Qwen3.

Run by test_visibility.py twice, with and without the hook; only what a patch changes may differ.
"""

from __future__ import annotations

import copy
import inspect
import json
import linecache
import pickle
import sys
import tempfile
import typing
from pathlib import Path

if sys.argv[1] == "patched":
    import veomni_hook.install  # noqa: F401

import torch
import transformers
import transformers.models.qwen3.modeling_qwen3 as module

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
QUALIFIED = {
    name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
}


def plain(text: str | None) -> str | None:
    return text and text.replace(str(Path(module.__file__).parent), "<folder>")


def facts_of_callable(value: object) -> dict[str, object]:
    function = inspect.unwrap(value)
    lines, start = inspect.getsourcelines(function)
    return {
        "signature": str(inspect.signature(value)),
        "doc": plain(inspect.getdoc(value)),
        "source": "".join(lines),
        "line_is_served": linecache.getline(function.__code__.co_filename, start) == lines[0],
        "file_is_the_modules": function.__code__.co_filename == module.__file__,
        "hints": {k: str(v) for k, v in typing.get_type_hints(function).items()},
    }


def facts_of_class(cls: type) -> dict[str, object]:
    own = {n: v for n, v in vars(cls).items() if inspect.isfunction(v) and v.__module__ == module.__name__}
    return {
        "mro": [c.__qualname__ for c in cls.__mro__],
        "doc": plain(cls.__doc__),
        "source": inspect.getsource(cls),
        "methods": {name: facts_of_callable(value) for name, value in own.items()},
        "pickled": pickle.loads(pickle.dumps(cls)) is cls,
        "attributes": sorted(n for n in vars(cls) if not n.startswith("__")),
    }


def training() -> dict[str, object]:
    torch.manual_seed(0)
    model = module.Qwen3ForCausalLM(module.Qwen3Config(**CONFIG))
    ids = torch.randint(0, 64, (2, 16))
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    model.eval()
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = module.Qwen3ForCausalLM.from_pretrained(folder).eval()
        auto = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits = [m(input_ids=ids).logits for m in (model, copied, unpickled, loaded, auto)]
    made = [auto, transformers.AutoModelForCausalLM.from_config(model.config)]
    classes = [type(m) is module.Qwen3ForCausalLM is transformers.Qwen3ForCausalLM for m in made]
    with torch.no_grad():
        generated = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "logits": logits[0].sum().item(),
        "one_class_everywhere": all(classes),
        "copies_agree": all(torch.equal(logits[0], other) for other in logits[1:]),
        "generated": generated.tolist(),
        "state": sorted(model.state_dict()),
    }


facts = {
    "classes": {n: facts_of_class(v) for n, v in QUALIFIED.items() if inspect.isclass(v)},
    "functions": {n: facts_of_callable(v) for n, v in QUALIFIED.items() if inspect.isfunction(v)},
    "all": module.__all__,
    "names": sorted(n for n in vars(module) if not n.startswith("__")),
    "can_set_experts": module.Qwen3ForCausalLM._can_set_experts_implementation(),
    "training": training(),
    "file": module.__file__,
    "version": transformers.__version__,
}
print(json.dumps(facts))
