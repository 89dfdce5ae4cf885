"""What every idiom is asked: which sites a text has, how the patched text reads, and what it computes."""

from __future__ import annotations  # and so code that is compiled here evaluates none

import ast
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.matching import close, gradients
from veomni_hook.kernels.slot import Slot
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits
from veomni_hook.patches.routes.compose import composed, with_copies
from veomni_hook.patches.routes.config import routes
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


def class_of(name: str, setup: str, forward: str, body: str, *, arguments: str = "") -> str:
    """A module with one class: what its ``__init__`` does, the name and parameters of its ``forward``, and its body."""
    setup, body = (textwrap.indent(text.strip("\n"), "        ") for text in (setup, body))
    return (
        f"{IMPORTS}class {name}(nn.Module):\n    def __init__(self{arguments}):\n        super().__init__()\n{setup}\n\n"
        f"    def {forward}:\n{body}\n"
    )


def sites_of(idiom: Any, text: str, module: str = "lookalike") -> list[Site]:
    return list(idiom.find(ModuleView(Document(text, module))))


def site_of(idiom: Any, text: str) -> Site:
    """The only site."""
    (site,) = sites_of(idiom, text)
    return site


def assert_routed(idiom: Any, text: str, variant: str, target: str, *said: str) -> Site:
    """The only site is routed; the patched text says ``said``, as it stands or with each statement on one line."""
    site = site_of(idiom, text)
    assert (site.status, site.variant, site.target) == (Status.ROUTED, variant, target), site.reason
    assert [slot.name for slot in site.slots] == [f"veomni_{site.op}_{variant}"]
    patched = spliced(text, [site])
    for code in said:
        assert code in patched or code in in_lines(patched)
    return site


def assert_missed(idiom: Any, text: str, reason: str = "") -> Site:
    """The only site is a candidate that is missed and not edited, for a reason that says ``reason``."""
    site = site_of(idiom, text)
    assert (site.status, site.edits, site.slots, site.counted) == (Status.MISSED, (), (), True), site.captures
    assert site.reason and reason in site.reason, site.reason
    return site


def spliced(source: str, sites: Iterable[Site]) -> str:
    """Return ``source`` with the edits of all ``sites``."""
    edits = [replace(edit, patch=number) for number, site in enumerate(sites) for edit in site.edits]
    document = Document(source)
    return apply_edits(source, with_copies(document, composed(document, edits)))


def changed(text: str, *changes: tuple[str, str], count: int = -1) -> str:
    """The text after replacements, each of which must apply."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, count)
    return text


def in_lines(text: str) -> str:
    """The code with every statement on one line."""
    return ast.unparse(ast.parse(text))


def executed(source: str, sites: Iterable[Site] = ()) -> dict[str, Any]:
    """Return the globals of the module ``source`` with the edits and the slots of ``sites``."""
    sites = list(sites)
    config = routes(sites, "lookalike")
    slots = config.slots if config is not None else [slot for site in sites for slot in site.slots]
    made = "".join(
        f"{each.name} = Slot({each.op!r}, {each.variant!r}, __name__, skips={dict(each.skips)!r})\n"
        for each in slots
    )
    imported = dict.fromkeys(pair for site in sites for pair in site.imports)
    made += "".join(f"from {module} import {name}\n" for module, name in imported)
    scope: dict[str, Any] = {"__name__": "lookalike", "Slot": Slot}
    # In the module's own frame, as with the engine, because a slot looks up code there.
    tree = ast.parse(spliced(source, sites))
    future = [each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    tree.body = [*future, *ast.parse(made).body, *(each for each in tree.body if each not in future)]
    exec(compile(tree, "lookalike.py", "exec"), scope)
    return scope


def compared(
    text: str,
    sites: Iterable[Site],
    owner: str,
    inputs: Sequence[torch.Tensor | tuple[int, ...]],
    *,
    arguments: tuple[Any, ...] = (),
    dtype: torch.dtype = torch.float32,
    cast: bool = True,
    change: Callable[[Any], object] = lambda module: None,
    call: Callable[..., Any] = lambda module, *operands: module(*operands),
    tolerance: float = 0.0,
    every: float = 0.0,
) -> dict[str, Any]:
    """Patched equals upstream: outputs, gradients of inputs and parameters, and the random numbers drawn.

    Args:
        owner: the class that is built twice, with these ``arguments`` and the same random parameters.
        inputs: tensors, or shapes of random ones; gradients are asked for where they have several dimensions.
        dtype: of the parameters, and of the inputs if they are ``cast``.
        change: what happens to the module before its ``call``.
        tolerance: how near gradients are, relative to the largest; 0 asks for equal bits.
        every: the same, for outputs as well.

    Returns: what each slot that was asked answered, by op, or by variant where an op has several.
    """
    results, outcomes = [], {}
    tensors = [torch.randn(each) if isinstance(each, tuple) else each for each in inputs]
    tensors = [each.to(dtype) if cast and each.is_floating_point() else each for each in tensors]
    wanted = [each.is_floating_point() and each.ndim > 1 for each in tensors]
    for routed in ([], list(sites)):
        scope = executed(text, routed)
        torch.manual_seed(0)
        module = scope[owner](*arguments)
        if isinstance(module, nn.Module):
            module.to(dtype)
        change(module)
        outputs, grads = gradients(lambda *each, module=module: call(module, *each), tensors, wanted)
        parameters = module.parameters() if isinstance(module, nn.Module) else ()
        results.append([*outputs, torch.rand(2), *grads, *(each.grad for each in parameters)])
        slots = [value for value in scope.values() if isinstance(value, Slot)]
        several = len({slot.op for slot in slots}) < len(slots)
        told = {slot.variant if several else slot.op: slot.outcome(module) for slot in slots}
        outcomes = {name: outcome for name, outcome in told.items() if outcome is not None}
    for place, (truth, found) in enumerate(zip(*results, strict=True)):
        assert (found is None) == (truth is None)
        if truth is not None:
            assert (found.dtype, found.shape) == (truth.dtype, truth.shape)
            if every or (tolerance and place > len(outputs)):
                close(found, truth, every or tolerance)
            else:
                assert torch.equal(found, truth), place
    return outcomes


def _hooked(owner: nn.Module, name: str) -> None:
    getattr(owner, name).register_forward_hook(lambda module, args, output: output * 2)


def _hooked_backward(owner: nn.Module, name: str) -> None:
    getattr(owner, name).register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


def _own_forward(owner: nn.Module, name: str) -> None:
    upstream = getattr(owner, name).forward
    getattr(owner, name).forward = lambda *operands: upstream(*operands) * 3


def _subclassed(owner: nn.Module, name: str) -> None:
    part = getattr(owner, name)
    part.__class__ = type("Sharded", (type(part),), {})


def _replaced(owner: nn.Module, name: str) -> None:
    setattr(owner, name, nn.Identity())


#: Changes of a module's part after which its own call matters, and what the slot says then.
part_changes = pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "has hooks"), (_hooked_backward, "has hooks"), (_own_forward, "has its own forward"),
        (_subclassed, "Sharded, not "), (_replaced, "Identity, not "),
    ],
)  # fmt: skip
