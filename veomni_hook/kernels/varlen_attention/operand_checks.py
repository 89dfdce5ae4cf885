"""Whether a kernel may replace transformers' attention function for the segments of a sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from veomni_hook.kernels.shared.host_values import derived
from veomni_hook.kernels.shared.operand_checks import dtype_of, not_plain, untraceable
from veomni_hook.kernels.shared.origin import name_of, written_in

__all__ = ["lengths_of", "refuses"]

_SDPA = ("transformers.integrations.sdpa_attention", "sdpa_attention_forward")
_TORCHS = torch.nn.functional.scaled_dot_product_attention
#: The arguments of transformers' function that kernels compute with; it ignores what it does not name.
_COMPUTED = frozenset(
    ("module", "query", "key", "value", "dropout", "scaling", "attention_mask", "is_causal")
)
#: Arguments that it reads although it does not name them.
_READ = frozenset(("softcap", "output_attentions"))


def refuses(
    owner: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., object],
    options: Mapping[str, object],
) -> str | None:
    """Return why this call must run the upstream code, or None. Operands: see `reference.full`."""
    if written_in(attention) != _SDPA:
        return f"the attention function is {name_of(attention)}, not transformers' sdpa"
    if torch.nn.functional.scaled_dot_product_attention is not _TORCHS:
        return "torch's scaled_dot_product_attention was replaced"
    reason = not_plain(query, key, value, cu_seqlens) or untraceable()
    reason = reason or _unknown_option(owner, attention, options) or _unfit(owner, query, key, value)
    if reason is not None:
        return reason
    lengths = lengths_of(cu_seqlens)
    if sum(lengths) != query.shape[2] or min(lengths, default=-1) < 0:
        return "the boundaries do not divide the sequence"
    return None


def _unfit(  # noqa: PLR0911 - one return a refusal
    owner: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> str | None:
    """Return why shapes or dtypes do not fit, or None."""
    if query.dim() != 4 or query.shape[0] != 1:
        return f"the batch has {query.shape[0]} sequences, and boundaries are known for one"
    if not query.shape[2]:
        return "there are no positions"
    if query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        return "query, key and value have lengths or heads that do not fit each other"
    groups = query.shape[1] // key.shape[1]
    if groups != 1 and getattr(owner, "num_key_value_groups", 1) != groups:
        return "key has other heads than query, and the module does not say so"
    if query.shape[3] != key.shape[3]:
        return "query and key have heads of different widths"
    if not dtype_of(query) == dtype_of(key) == dtype_of(value):
        return "query, key and value have different dtypes"
    return None


def lengths_of(cu_seqlens: torch.Tensor) -> list[int]:
    """Return the lengths of the segments; the host waits only at the first call for a tensor of a device."""
    return derived(cu_seqlens, _lengths)


def _lengths(cu_seqlens: torch.Tensor) -> list[int]:
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def _unknown_option(owner: object, attention: object, options: Mapping[str, object]) -> str | None:
    if options.get("attention_mask") is not None:
        return "the segments have a mask"
    causal = options.get("is_causal")
    if getattr(owner, "is_causal", True) if causal is None else causal:
        return "the attention is causal"
    if options.get("dropout"):
        return f"the attention has dropout ({options['dropout']}), whose random numbers would be others"
    for name in _read_options(attention):
        value = options.get(name)
        if value is not None and value is not False:
            return f"{name} is given, which no kernel reads"
    return None


@lru_cache(maxsize=8)
def _read_options(attention: Callable[..., object]) -> frozenset[str]:
    """Return the arguments that ``attention`` reads and kernels do not; a release may have more."""
    parameters = inspect.signature(attention).parameters.values()
    named = frozenset(
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    )
    return (named | _READ) - _COMPUTED
