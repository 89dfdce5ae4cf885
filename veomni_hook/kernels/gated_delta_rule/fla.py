"""The gated delta rule by flash-linear-attention, where it is asked for by name.

Its functions take what ours take, with two differences: samples that share a row need a batch of one row, and
states are float32. With Triton 3.4.0 to 3.7.0 on Hopper its backward raises an error, after the forward of
the whole model; here a call that needs a gradient says so first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version

import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.shared.autograd import differentiated_once
from veomni_hook.kernels.shared.operand_checks import wants_grad

__all__ = ["channel_decay", "refuses", "scalar_decay"]

Tensor = torch.Tensor
_HALF = (torch.bfloat16, torch.float16)
#: Releases of Triton from the first to before the second miscompile its backward there (its issue 640).
_WRONG, _HOPPER = ((3, 4, 0), (3, 7, 1)), 9
_MOST = 256


def _by(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the rule by a function of the package, as `reference` says."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Raise KernelError if the package's backward would be wrong."""
        operands: tuple[Tensor, ...] = (query, key, value, g, beta)
        tensors = operands if initial_state is None else (*operands, initial_state)
        if wants_grad(*tensors) and (reason := _wrong(value.device)) is not None:
            raise KernelError(
                f"flash-linear-attention's backward is wrong with {reason}",
                where="gated_delta_rule=fla",
                fix="install Triton 3.7.1 or later, or choose gated_delta_rule=triton",
            )
        if (repeated := value.shape[2] // query.shape[2]) > 1:  # not every release shares heads of keys
            query, key = (x.repeat_interleave(repeated, dim=2) for x in (query, key))
            operands = query, key, value, g, beta
        if cu_seqlens is not None:
            operands = tuple(x.flatten(0, 1).unsqueeze(0) for x in operands)
        q, k, v, decay, write = (x.contiguous() for x in operands)
        output, final = getattr(import_module(module), name)(
            q,
            k,
            v,
            g=decay,
            beta=write,
            initial_state=None if initial_state is None else initial_state.float().contiguous(),
            output_final_state=bool(output_final_state),
            use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        )
        output = differentiated_once("gated_delta_rule=fla", output.reshape(value.shape))
        return output, differentiated_once("gated_delta_rule=fla", final) if output_final_state else None

    return rule


scalar_decay = _by("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
channel_decay = _by("fla.ops.kda", "chunk_kda")


def _wrong(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    installed = _triton()
    first, after = _WRONG
    return f"Triton {'.'.join(map(str, installed))} on Hopper" if first <= installed < after else None


@cache
def _triton() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split("+")[0].split(".")[:3])


def refuses(owner: object, query: Tensor, key: Tensor, value: Tensor, *others: object) -> str | None:
    """Return what the package refuses, beside `operand_checks`, or None."""
    if query.dtype not in _HALF or not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    return None if query.shape[3] <= _MOST else f"heads of {query.shape[3]} are wider than {_MOST}"
