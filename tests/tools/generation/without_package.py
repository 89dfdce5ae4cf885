"""Where this package cannot be imported: models of generated files beside upstream's, as one line of JSON.

Arguments: a folder with a file for each family.
"""

from __future__ import annotations

import importlib.abc
import inspect
import json
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from tests.veomni.configurations import CLASSES, CONFIGURATIONS, IMAGE, VISION_END, VISION_START, patch

#: Families, by the name that VeOmni's folder has.
FAMILIES = {CONFIGURATIONS[name][0]: name for name in ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen2_5vl")}
SEES = ("qwen3_5", "qwen2_5_vl")


class Absent(importlib.abc.MetaPathFinder):
    """Says that the package is not there."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] == "veomni_hook":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def from_file(path: Path) -> Any:
    spec = spec_from_file_location(f"vendored_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(module: Any) -> set[str]:
    """Let the functions that the file has for formulas tell that they are called, by their names."""
    called: set[str] = set()

    def telling(name: str, function: Any) -> Any:
        return lambda *operands, **options: called.add(name) or function(*operands, **options)

    for name, function in list(vars(module).items()):
        if name.startswith("veomni_") and inspect.isfunction(function):
            setattr(module, name, telling(name, function))
    return called


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Two rows of text, or a row with a picture."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, IMAGE, (2, 12), generator=generator)
    if family not in SEES:
        return {"input_ids": tokens, "labels": tokens}
    row = torch.tensor([[*tokens[0, :4], VISION_START, *[IMAGE] * 4, VISION_END, *tokens[1, :5]]])
    return {
        "input_ids": row,
        "labels": row,
        "attention_mask": torch.ones_like(row),
        "mm_token_type_ids": (row == IMAGE).long(),
        "pixel_values": torch.randn(16, patch(FAMILIES[family]), generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def step(model: Any, family: str) -> dict[str, torch.Tensor]:
    taken = inspect.signature(model.forward).parameters
    loss = model(**{name: value for name, value in inputs(family).items() if name in taken}).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def compared(family: str, path: Path) -> dict[str, Any]:
    folder = FAMILIES[family]
    _, name, values = CONFIGURATIONS[folder]
    upstream = import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(import_module(f"transformers.models.{family}.configuration_{family}"), name)(**values)
    torch.manual_seed(0)
    theirs = getattr(upstream, CLASSES[folder][0])(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    vendored = from_file(path)
    called = watched(vendored)
    ours = getattr(vendored, CLASSES[folder][0])(config)
    ours.load_state_dict(theirs.state_dict())
    found, expected = step(ours, family), step(theirs, family)
    far = {
        key: float((found[key] - value).norm() / value.norm().clamp(min=1e-6))
        for key, value in expected.items()
    }
    return {
        "far": max(far.values()),
        "same": found.keys() == expected.keys(),
        "numbers": len(far),
        "called": sorted(called),
    }


def main() -> None:
    sys.meta_path.insert(0, Absent())
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    print(json.dumps({family: compared(family, folder / f"{family}.py") for family in FAMILIES}))


if __name__ == "__main__":
    main()
