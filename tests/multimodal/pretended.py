"""A pretended GPU on a CPU: tensors that say they are on one, and a count of when the host would wait.

`Pretended` wraps a tensor of the CPU. Operators run on what they wrap, so values are right; a mixture with
tensors of the CPU is an error, as on a GPU, and so is a tensor of the wrong side. `Waits` counts the
operators for which the host of a GPU waits, with the place in the code that called them.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from veomni_hook.kernels.shared.operand_checks import count_as_plain

KIND = "pretended"
_LIBRARY = torch.library.Library("aten", "IMPL")
#: Operators that give the host a value, or a result whose size depends on values.
_READING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "argwhere", "nonzero_static",
}  # fmt: skip


def register() -> None:
    """Make torch know the device, for the rest of the process; so use it in one of its own."""
    backend_registration._setup_privateuseone_for_python_backend(KIND)
    # `torch.tensor` leaves out modes and subclasses when it moves what it made.
    for operator, function in _WITHOUT_MODES.items():
        _LIBRARY.impl(operator, function, "PrivateUse1")


class Pretended(torch.Tensor):
    """A tensor that says it is on a GPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=torch.device(KIND, 0), requires_grad=requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.held!r})"

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def __deepcopy__(self, memo: Any) -> Pretended:
        return type(self)(self.held.clone(), self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def _empty(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Pretended(torch.empty_strided(size, stride, dtype=dtype))


def _copied(source, target, non_blocking=False):
    if not non_blocking and source.numel() and _ACTIVE:
        _ACTIVE[-1].found["blocking copy", _caller()] += 1
    target.held.copy_(source.held if isinstance(source, Pretended) else source)
    return target


def _value(tensor):
    if _ACTIVE:
        _ACTIVE[-1].found["_local_scalar_dense", _caller()] += 1
    return tensor.held.item()


_WITHOUT_MODES = {"empty_strided": _empty, "_copy_from": _copied, "_local_scalar_dense": _value}
count_as_plain(Pretended)


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on what tensors wrap."""
    flat = list(_tensors((args, kwargs)))
    ours = any(isinstance(each, Pretended) for each in flat)
    wanted = kwargs.get("device")
    name = function._schema.name.partition("::")[2]
    to_host = name in ("_to_copy", "to") and wanted is not None and torch.device(wanted).type == "cpu"
    made_here = wanted is not None and torch.device(wanted).type == KIND
    if ours and name not in ("_to_copy", "copy_", "index", "index_put_", "index_put", "_index_put_impl_"):
        for each in flat:
            if not isinstance(each, Pretended) and each.dim() > 0:
                raise RuntimeError(f"{name}: expected all tensors on one device, found two")
    kwargs = {**kwargs, "device": torch.device("cpu")} if made_here or to_host else kwargs
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": False}
    inner_args, inner_kwargs = _mapped(_inner, args), _mapped(_inner, kwargs)
    if name == "histc" and not inner_args[0].is_floating_point():
        return _wrapped(torch.histc(inner_args[0].float(), *inner_args[1:], **inner_kwargs).int())
    result = function(*inner_args, **inner_kwargs)
    if name.endswith("_") and name != "_" and isinstance(args[0], Pretended) and result is inner_args[0]:
        if args[0].shape != result.shape:
            with no_dispatch():
                torch.ops.aten.as_strided_(args[0], result.shape, result.stride(), result.storage_offset())
        return args[0]
    stays = ours and not to_host and name != "_local_scalar_dense"
    if name == "copy_" and not isinstance(args[0], Pretended):
        return args[0]
    return _mapped(_wrapped, result) if stays or made_here else result


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def _wrapped(value: Any) -> Any:
    return Pretended(value) if isinstance(value, torch.Tensor) and not isinstance(value, Pretended) else value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for each in values:
            yield from _tensors(each)
    elif isinstance(values, dict):
        yield from _tensors([*values.values()])


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What operators take and return, with ``function`` applied to the leaves. Torch's own took half of a step."""
    if isinstance(value, tuple):
        return tuple([_mapped(function, each) for each in value])
    if isinstance(value, list):
        return [_mapped(function, each) for each in value]
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


class Waits(TorchDispatchMode):
    """Counts operators for which the host would wait, by operator and calling line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return counted(function, args, kwargs or {})

    def __enter__(self):
        _ACTIVE.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _ACTIVE.pop()
        return super().__exit__(*error)


_ACTIVE: list[Waits] = []


def counted(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, and count it if the host would wait."""
    if _ACTIVE and (why := waits(function, args, kwargs)) is not None:
        _ACTIVE[-1].found[why, _caller()] += 1
    return run(function, args, kwargs)


def waits(function: Any, args: Any, kwargs: Any) -> str | None:
    """Why the host of a GPU would wait for an operator, or None."""
    name = function._schema.name.partition("::")[2]
    flat = list(_tensors((args, kwargs)))
    ours = any(isinstance(each, Pretended) for each in flat)
    wanted = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if name in _READING and ours:
        return name
    if name == "_to_copy" and ours and wanted == "cpu":
        return "copy to the host"
    if name == "_to_copy" and not ours and wanted == KIND and not kwargs.get("non_blocking"):
        return "blocking copy to the device"
    if name == "copy_" and isinstance(args[0], Pretended) != isinstance(args[1], Pretended):
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return "blocking copy" if blocks or not isinstance(args[0], Pretended) else None
    if name in ("index", "index_put_", "index_put", "_index_put_impl_") and ours:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            return f"{name} by a mask"
        if any(not isinstance(each, Pretended) for each in indices):
            return f"{name} by indices of the host"
    if name == "repeat_interleave" and ours and kwargs.get("output_size") is None:
        return name
    if name in ("masked_scatter_backward",) and ours:
        return name
    return None


def _caller() -> str:
    """The innermost line outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            return f"{'/'.join(frame.filename.rsplit('/', 2)[1:])}:{frame.lineno} {frame.name}"
    return "?"


def on_device(value: Any) -> Any:
    """Move tensors, or a module's parameters and buffers, to the pretended device."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    moved = Pretended(parameter.detach().clone())
                    module._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = Pretended(buffer)
        return value
    return _mapped(_wrapped, value)


def sent(batch: dict[str, Any]) -> dict[str, Any]:
    """Move a batch as a loop does, with ``to``."""
    with Waits():
        device = torch.device(KIND, 0)
        return {
            name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()
        }


register()
