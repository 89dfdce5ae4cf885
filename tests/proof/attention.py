"""The prover of attention whose norms and rotation are one op: the whole forward, with eager attention."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.proof.build import Unbuildable, build, family_config, randomise, real_config, telling
from tests.proof.compare import MODE
from tests.proof.configs import HIDDEN, Small
from tests.proof.inputs import Inputs
from tests.proof.provers import Proof, Tally, slots_of, typed
from veomni_hook.kernels.shared import function_modes

BATCH, LENGTH = 2, 5
#: Flags at which a forward goes past the norms or the rotation, and values at which it does not.
VALUES = {
    "_attn_implementation": "eager", "num_key_value_heads": 2, "use_qk_norm": True, "qk_norm_type": "qwen3",
    "is_causal": True,
}  # fmt: skip


def prove_attention(site: Any, module: Any) -> Proof:
    """Prove the forward of an attention, over widths of the tables and dtypes."""
    cls = getattr(module, site.target.partition(".")[0])
    slots, tally = slots_of(module, site.op), Tally(site.variant)
    owners = list(_instances(cls, module))
    for (held, dtype), owner in itertools.product(MODE.mixed(), owners):
        owner.to(held)
        for inputs in _calls(owner, dtype):
            if tally.enough():
                return tally.proof()
            counts = held is dtype or not tally.fits(dtype)
            call, given = partial(_with_scores, owner), typed(inputs, dtype)
            tally.compare(slots, owner, call, given, dtype, ["hidden_states"], counts=counts)
    return tally.proof()


def _with_scores(owner: nn.Module, **inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    """What a forward returns, and its products of queries and keys: some return only which keys are best."""
    with _Products() as products:
        return owner.forward(**inputs), products.found


#: The spellings of a product: upstream's, and that of the formulas, which may compute the attention around it.
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _Products(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self.found.append(result)
        return result


# It reads results, and leaves them as they are: kernels may run below it.
function_modes.HARMLESS |= {f"{_Products.__module__}.{_Products.__qualname__}"}


def _instances(cls: type[nn.Module], module: Any) -> Iterator[nn.Module]:
    """The attention as each kind of layer that its configuration knows."""
    parameter = inspect.signature(cls.__init__).parameters.get("config")
    real = real_config(parameter.annotation, module) if parameter is not None else None
    # A decorator of some releases hides the parameters.
    made = build if parameter is not None else _build
    config = Small(real or family_config(module, cls.__name__), **VALUES)
    failure: Unbuildable | None = None
    built = 0
    for kinds in (None, ["sliding_attention"] * 2, ["full_attention"] * 2):
        if kinds is not None:
            config.layer_types = kinds
        try:
            yield made(cls, config).eval()
            built += 1
        except Unbuildable as error:
            failure = failure or error
    if not built and failure is not None:
        raise failure


def _build(cls: type[nn.Module], config: Small) -> nn.Module:
    """An instance by the arguments that an attention has; heads are given where each layer has its own."""
    failures = []
    for more in ({}, {"num_heads": config.num_attention_heads}):
        try:
            return telling(randomise(cls(config, layer_idx=0, **more)))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    raise Unbuildable(f"{cls.__name__}: {'; '.join(failures)}")


def _calls(owner: nn.Module, dtype: torch.dtype) -> Iterator[Inputs]:
    """Hidden states and tables of every width and dtype that may fit, of one batch and of several."""
    parameters = list(inspect.signature(inspect.unwrap(type(owner).forward)).parameters.values())[1:]
    head = next(p.shape[0] for name, p in owner.named_parameters() if "norm" in name and p.dim() == 1)
    for width, batch, table in itertools.product(
        (head, head // 2, head // 4), (1, BATCH), {dtype, MODE.dtypes[0]}
    ):
        inputs: Inputs = {}
        for parameter in parameters:
            if parameter.name == "position_embeddings":
                inputs[parameter.name] = tuple(torch.randn(batch, LENGTH, width).to(table) for _ in "cs")
            elif "hidden_states" in parameter.name:
                inputs[parameter.name] = torch.randn(BATCH, LENGTH, HIDDEN)
            elif parameter.name == "position_ids":
                inputs[parameter.name] = torch.arange(LENGTH).repeat(BATCH, 1)
            elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                inputs[parameter.name] = None
        yield inputs
