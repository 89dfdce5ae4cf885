"""The provers of losses: tails of ``forward`` around a stand-in for the inner model, and auxiliary losses."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.proof.build import Unbuildable
from tests.proof.compare import MODE, Differs, Run, tensors
from tests.proof.configs import EXPERTS, HIDDEN, TOP_K, VOCABULARY
from tests.proof.provers import UNFIT, Proof, Tally, Unreached, both, slots_of, typed, with_kernels
from tests.proof.stubs import Inner, model_around
from tests.proof.texts import definition, upstream_of

BATCH, LENGTH, CODEBOOKS = 2, 7, 3


def prove_linear_cross_entropy(site: Any, module: Any) -> Proof:
    """Prove a loss tail or a classifier: loss, logits, gradients of hidden states and of the head."""
    tail = Tail(site, module)
    tally = Tally(site.variant)
    numbers = [{}, tail.telling()]
    counts = [{}, {"num_items_in_batch": torch.tensor(5)}] if tail.counts_items else [{}]
    for dtype, values, extra in itertools.product(MODE.dtypes, numbers, counts):
        expected, call = tail.upstream(dtype, values, extra)
        owner, step = call()
        try:
            found = with_kernels(MODE.kernels, step)
        except Exception as error:
            raise Differs(f"only the guarded path raises {type(error).__name__}: {error}") from error
        outcome = tail.outcome(owner)
        if outcome is None or outcome.backend != MODE.kernels:
            raise Unreached(f"the guard was not taken: {outcome}")
        gradients = expected.gradients
        makes = tail.makes_logits(owner)
        head = [name for name in gradients if name.startswith(f"{makes}.")] or [makes]
        inner = [name for name in gradients if name.endswith(".hidden")] or ["hidden states"]
        tally.add(expected, found, {site.variant}, dtype, [*head, *inner])
    return tally.proof()


class Tail:
    """A site's model, made around its tail, and calls of it.

    The first of several kinds of arguments and widths of hidden states that upstream's body takes is used.
    """

    def __init__(self, site: Any, module: Any) -> None:
        self._site, self._module = site, module
        self._cls = _concrete(getattr(module, site.target.partition(".")[0]))
        forward = definition(ast.parse(upstream_of(module)), site.target)
        assert isinstance(forward, ast.FunctionDef)
        self._forward = forward
        head = site.captures.get("head") or site.captures.get("score") or "self.lm_head"
        self.head = re.split(r"[.\[]", head.removeprefix("self."))[0]
        self.counts_items = site.variant == "next_token" and self._forward.args.kwarg is not None
        self._also: frozenset[str] = frozenset()

    def makes_logits(self, owner: nn.Module) -> str:
        """The attribute with the parameters of the head; a head that has none hands on what another makes."""
        before = re.search(r"before_head=self\.(\w+)", self._site.captures.get("options", ""))
        if before is None or any(True for _ in owner.get_submodule(self.head).parameters()):
            return self.head
        return before[1]

    def telling(self) -> dict[str, Any]:
        """Numbers for the transform of the logits with which it cannot be mistaken for none."""
        names = re.findall(
            r"(softcap|scale|divisor)=[\w.()]*?(\w+)\b(?![.(])", self._site.captures.get("options", "")
        )
        return {name: 2.0 if option == "softcap" else 1.5 for option, name in names}

    def outcome(self, owner: nn.Module) -> Any:
        """What the guard of the last call got."""
        slots = [slot for slot in slots_of(self._module, self._site.op) if slot.variant == self._site.variant]
        noted = [held.latest.last for slot in slots if (held := slot.records.of(owner)) is not None]
        return noted[0] if noted else None

    def upstream(self, dtype: torch.dtype, values: dict[str, Any], extra: dict[str, Any]) -> tuple[Run, Any]:
        """Upstream's run, and what makes the same call anew.

        Raises:
            Unbuildable: its body takes no kind of arguments.
        """
        notes: dict[str, None] = {}
        for width, (embedded, placed) in itertools.product((None, HIDDEN), KINDS):

            def call(width: Any = width, embedded: bool = embedded, placed: bool = placed) -> Any:
                torch.manual_seed(0)
                owner = model_around(
                    self._cls, self._forward, self.head, (BATCH, LENGTH), self._also, values, width
                )
                owner.to(dtype)
                for inner in owner.modules():
                    if isinstance(inner, Inner):
                        inner.dtype = dtype
                given = arguments(self._forward, self._site.variant, embedded=embedded, placed=placed)
                return owner, partial(_step, owner, typed(given | extra, dtype))

            while True:
                try:
                    return with_kernels("eager", call()[1]), call
                except AttributeError as error:
                    # What a helper of the class reads: made as well, once.
                    if (
                        error.name is not None
                        and error.name not in self._also
                        and isinstance(error.obj, self._cls)
                    ):
                        self._also |= {error.name}
                        continue
                    notes[f"AttributeError: {error}"] = None
                except UNFIT as error:
                    notes[f"{type(error).__name__}: {error}"] = None
                break
        raise Unbuildable(f"upstream's body takes no arguments that were tried: {'; '.join(notes)}"[:600])


def _concrete(cls: type[nn.Module]) -> type[nn.Module]:
    """A class that can be made: mixins of modeling_layers get the base of a model."""
    if issubclass(cls, nn.Module):
        return cls
    from transformers.modeling_utils import PreTrainedModel

    made = type(
        cls.__name__, (cls, PreTrainedModel), {"__module__": cls.__module__, "base_model_prefix": "model"}
    )
    return made


#: With ``inputs_embeds`` in place of ids, and with ``position_ids``.
KINDS = ((False, False), (True, False), (True, True))


def arguments(forward: ast.FunctionDef, variant: str, *, embedded: bool, placed: bool) -> dict[str, Any]:
    """What a forward is called with."""
    generator = torch.Generator().manual_seed(3)
    names = [argument.arg for argument in (*forward.args.args[1:], *forward.args.kwonlyargs)]
    required = len(forward.args.args) - 1 - len(forward.args.defaults)
    given: dict[str, Any] = {}
    for number, name in enumerate(names):
        if name == "labels":
            given[name] = _labels(forward, variant, generator)
        elif name in ("input_ids", "decoder_input_ids") and not embedded:
            given[name] = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
        elif name == "inputs_embeds" and embedded:
            given[name] = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
        elif name == "position_ids" and placed:
            given[name] = torch.arange(LENGTH).repeat(BATCH, 1)
        elif name in ("attention_mask", "decoder_attention_mask"):
            given[name] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        elif name == "output_router_logits":
            given[name] = True
        elif number < required and name != "input_ids":
            given[name] = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
    return given


def _labels(forward: ast.FunctionDef, variant: str, generator: torch.Generator) -> torch.Tensor:
    if variant != "next_token":
        return torch.randint(0, 2, (BATCH,), generator=generator)
    # As many dimensions as the forward takes apart: some models predict several codebooks.
    ranks = [
        len(node.slice.elts)
        for node in ast.walk(forward)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and isinstance(node.value, ast.Name)
        and node.value.id == "labels"
    ]
    shape = (BATCH, LENGTH, *[CODEBOOKS] * (max([2, *ranks]) - 2))
    labels = torch.randint(1, VOCABULARY, shape, generator=generator)
    labels[0, 2:4] = -100
    return labels


def _step(owner: nn.Module, given: dict[str, Any]) -> Run:
    if MODE.run is not None:
        # Not the logits: a model whose logits are read in training computes them from then on.
        found = MODE.run(lambda **given: {"loss": _loss(owner.forward(**given))}, given, owner)
        return Run({name.replace("grad of self.", "grad of "): value for name, value in found.items()})
    torch.manual_seed(2)
    made = owner.forward(**given)
    loss = _loss(made)
    if loss is None:
        raise ValueError("no loss came out")
    loss.backward()
    result = Run({"loss": loss.detach().clone()})
    logits = getattr(made, "logits", None)
    if isinstance(logits, torch.Tensor):
        result["logits"] = logits.detach().clone()
    for name, value in tensors(dict(made) if isinstance(made, dict) else made).items():
        result.setdefault(name, value.detach().clone())
    for name, parameter in owner.named_parameters():
        if parameter.grad is not None:
            result[f"grad of {name}"] = parameter.grad.clone()
    return result


def _loss(made: Any) -> torch.Tensor | None:
    loss: torch.Tensor | None = made.loss if hasattr(made, "loss") else made[0]
    return loss


def prove_load_balancing_loss(site: Any, module: Any) -> Proof:
    """Prove an auxiliary loss through ``slot.at``: several layers, without and with a mask."""
    upstream = getattr(module, site.target)
    slots = [slot for slot in slots_of(module, site.op) if slot.variant == site.variant]
    if not slots:
        raise Unreached("the module has no slot for it")
    names = list(inspect.signature(upstream).parameters)
    masks = (None, torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7]))
    tally = Tally(site.variant)
    for dtype, mask, slot in itertools.product(MODE.dtypes, masks, slots):
        owner = nn.Module()
        logits = {f"layer{i}": torch.randn(BATCH * LENGTH, EXPERTS).to(dtype) for i in range(3)}

        def call(mask: Any = mask, owner: nn.Module = owner, slot: Any = slot, **layers: torch.Tensor) -> Any:
            values = (tuple(layers.values()), EXPERTS, TOP_K, mask)
            return slot.at(owner, upstream)(**dict(zip(names, values, strict=False)))

        expected, found, taken, refused = both([slot], owner, call, logits)
        if not taken:
            raise Unreached(f"the guard was not taken: {refused}")
        tally.add(expected, found, taken, dtype, logits)
    return tally.proof()
