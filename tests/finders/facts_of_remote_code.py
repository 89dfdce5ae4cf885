"""Prints, as JSON, what becomes of a model whose code travels with its weights: load, train, save, load again.

Run by test_remote.py with the hook: `facts_of_remote_code.py MODE REPOSITORY FOLDER`; without it ("plain") in its own
process.
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1] == "early":
        import transformers.dynamic_module_utils  # noqa: F401
    import veomni_hook.install

import torch
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_in_module


def trained(model: torch.nn.Module) -> dict[str, object]:
    """One training step's loss and gradients."""
    tokens = torch.arange(12).reshape(2, 6)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.item(), "gradients": {n: p.grad.tolist() for n, p in model.named_parameters()}}


def frame_of(model: torch.nn.Module) -> list[str | None]:
    """File and line of the place where the inner norm fails."""
    try:
        model.inner(torch.ones(2, 3))
    except RuntimeError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return [frame.filename, frame.line]
    raise AssertionError


def module_of(cls: type) -> dict[str, object]:
    """What introspection says about a norm's class and its module."""
    module = sys.modules[cls.__module__]
    lines, start = inspect.getsourcelines(cls.forward)
    code = inspect.unwrap(cls.forward).__code__
    return {
        "name": module.__name__,
        "file": module.__file__,
        "code": code.co_filename,
        "method": "".join(lines),
        "line": linecache.getline(code.co_filename, start),
        "loader": type(module.__loader__).__name__,
        "loader_source": module.__loader__.get_source(module.__name__),
    }


def found(mode: str, repository: str, folder: str) -> dict[str, object]:
    model = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True)
    facts: dict[str, object] = {"inner": module_of(type(model.inner)), "outer": module_of(type(model.outer))}
    if mode == "early":
        return facts
    facts |= {"frame": frame_of(model), "trained": trained(model)}
    model.save_pretrained(folder)
    facts["saved"] = {path.name: path.read_text() for path in Path(folder).glob("*.py")}
    facts["again"] = trained(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))

    # transformers executes a module again when its file has changed.
    module = sys.modules[type(model).__module__]
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("self.eps)", "self.eps + 5)"))
    parts = module.__name__.split(".")[1:]
    changed = get_class_in_module(type(model).__name__, str(Path("transformers_modules", *parts)) + ".py")
    facts["changed"] = {
        "same module": sys.modules[changed.__module__] is module,
        "method": inspect.getsource(module.PebbleOuterRMSNorm.forward),
        "loader_source": module.__loader__.get_source(module.__name__),
        "constant": module.PebbleOuterRMSNorm.forward.__code__.co_consts,
    }
    if mode != "plain":
        facts["outcomes"] = veomni_hook.install.handle.status().to_dict()["modules"]
        facts["explained"] = [[row.op, row.backend] for row in veomni_hook.explain(model).rows]
    return facts


if __name__ == "__main__":
    print(json.dumps(found(*sys.argv[1:])))
