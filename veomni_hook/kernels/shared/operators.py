"""Custom torch operators for kernels, known to fake tensors, tracers and `torch.library.opcheck`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import torch
from torch import compiler as _compiler
from torch.compiler import config as compiler_options
from torch.compiler import is_dynamo_compiling

from veomni_hook import accelerator

__all__ = ["called_directly", "operator", "watched"]

_Result = TypeVar("_Result")

_modes = torch._C._len_torch_dispatch_stack
#: Whether `called_directly` is in force.
_direct = False
# Without the check of `torch.cuda.current_device` that CUDA is initialised: a tensor is there.
# Builds without CUDA have no such function.
_current_cuda_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# `define` and `impl` cost less per call than the decorators of `torch.library.custom_op`.
_LIBRARY: Any = torch.library.Library("veomni_hook", "FRAGMENT")  # type: ignore[no-untyped-call]

#: Annotations, without "torch.", as types of a schema. `torch.library.infer_schema` makes numbers of a kernel
#: symbolic.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "bool": "bool",
    "Sequence[bool]": "bool[]",
    "int": "int",
    "int | SymInt": "SymInt",
    "Sequence[int]": "int[]",
    "float": "float",
    "float | None": "float?",
    "Sequence[float]": "float[]",
    "str": "str",
    "dtype": "ScalarType",
}


def operator(
    fake: Callable[..., object], schema: str | None = None
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Define ``torch.ops.veomni_hook.<name>`` without a gradient, by its implementation.

    The function that takes the implementation's place has the same parameters. If nothing observes operators
    (fake tensors, selective checkpointing, a dispatch profiler), it calls the implementation directly, which
    saves the host the dispatcher's overhead. The implementation is called with the device of its first
    operand, a tensor, as the current device, on which Triton launches. It must not mutate its input or return
    an alias of it.

    Args:
        fake: takes the operands without data and returns results of the same shapes, dtypes and strides.
        schema: name, parameters and results, in the form of `torch.library.Library.define`; by default those
            of the implementation. A parameter that the schema does not have, such as one with a default, is
            for direct calls alone.
    """

    def define(implementation: Callable[..., _Result]) -> Callable[..., _Result]:
        signature = schema or schema_of(implementation)
        name = signature.partition("(")[0]
        _LIBRARY.define(signature)
        launch = on_its_device(implementation)
        _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")

        @wraps(fake)
        def traced(*operands: object, **named: object) -> object:
            _tell_caches()
            return fake(*operands, **named)

        torch.library.register_fake(f"veomni_hook::{name}", traced, lib=_LIBRARY)
        dispatched = getattr(torch.ops.veomni_hook, name).default

        @wraps(implementation)
        def call(x: torch.Tensor, *operands: object, **direct: object) -> Any:
            if watched():
                return dispatched(x, *operands)
            # As `launch`, which takes one more call.
            if x.is_cpu or (x.is_cuda and x.get_device() == _current_cuda_device()):
                return implementation(x, *operands, **direct)
            return launch(x, *operands, **direct)

        call.__name__ = name
        return call

    return define


@cache
def _tell_caches() -> None:
    """Let torch's caches on disk keep code that was compiled with other versions of these operators apart.

    Such code has the sizes and strides of results as they were, and fails where they are others now. The key
    has the names of operators, and what `torch.compiler.config.cache_key_tag` says.
    """
    compiler_options.cache_key_tag += f" veomni_hook.kernels {_digest(files('veomni_hook.kernels'))}"


def _digest(folder: Traversable) -> str:
    """Return a digest of all code in a folder, which may be in a zip file, or compiled alone."""
    hasher = blake2b(digest_size=20)
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.name == "__pycache__":
            continue
        if item.is_dir():
            hasher.update(f"{item.name}/{_digest(item)}".encode())
        elif item.name.endswith((".py", ".pyc")):
            data = item.read_bytes()
            hasher.update(f"{item.name} {len(data)} ".encode() + data)
    return hasher.hexdigest()


def schema_of(function: Callable[..., object]) -> str:
    """Return the schema that a function's name, annotations (as text) and parameters without default say."""
    name, annotations = function.__name__.strip("_"), inspect.get_annotations(function)
    result = annotations.pop("return")
    results = result[6:-1].split(", ") if result.startswith("tuple[") else [result]
    parameters = inspect.signature(function).parameters
    operands = [one for one in annotations if parameters[one].default is inspect.Parameter.empty]
    types = {
        text: _TYPES.get(text.replace("torch.", "").replace("list[", "Sequence["))
        for text in (*results, *(annotations[one] for one in operands))
    }
    if unknown := [text for text, kind in types.items() if kind is None]:
        raise TypeError(
            f"{function.__name__}: an operator takes and returns no {' or '.join(unknown)}; write its schema"
        )
    outcome = ", ".join(str(types[text]) for text in results)
    outcome = f"({outcome})" if result.startswith("tuple[") else outcome
    return f"{name}({', '.join(f'{types[annotations[one]]} {one}' for one in operands)}) -> {outcome}"


def on_its_device(implementation: Callable[..., object]) -> Callable[..., Any]:
    """Return ``implementation``, called with the device of its first operand as the current device."""

    # A model spread over several devices runs all of them from one current device.
    @wraps(implementation)
    def launch(x: torch.Tensor, *operands: object, **direct: object) -> Any:
        # Numbers instead of `torch.device`: this is asked at every launch.
        if x.is_cpu or (x.is_cuda and x.get_device() == _current_cuda_device()):
            return implementation(x, *operands, **direct)
        device = x.device
        there = accelerator.module(device)
        if there is None or device.index == there.current_device():
            return implementation(x, *operands, **direct)
        with there.device(device.index):
            return implementation(x, *operands, **direct)

    return launch


def watched() -> bool:
    """Return whether a call must use the dispatcher, so that operators behave as their schema says."""
    # Dynamo knows the first function; tracers that run the code set the flag.
    return is_dynamo_compiling() or _compiler._is_compiling_flag or (_modes() > 0 and not _direct)


@contextmanager
def called_directly() -> Iterator[None]:
    """Let operators call their implementation in the block, so that its modes see what that allocates."""
    global _direct  # noqa: PLW0603 - backward passes have threads of their own
    before, _direct = _direct, True
    try:
        yield
    finally:
        _direct = before
