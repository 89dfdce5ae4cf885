"""Guards and their launches on a CPU, without a device: Triton's compiled functions do nothing.

What the host does until a kernel is launched runs as on a GPU, including the launch by `shared.launch`; results
have shapes and dtypes, but no values. For counting and profiling, not for computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from inspect import unwrap
from typing import Any
from unittest import mock

from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.process_choice import STATE, set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.shared import launch

OPS = (
    "rms_norm", "add_rms_norm", "gated_mlp", "rotary", "qk_norm_rotary", "nn_layer_norm", "add_layer_norm"
)  # fmt: skip
CHOICE = ",".join(f"{op}=fake" for op in OPS)


class _Launcher:
    """Has the form of Triton's; its C function does nothing."""

    def __init__(self) -> None:
        self.launch = "".format

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, *arguments)


class _Compiled:
    function, packed_metadata = 1, (4, 1, 0)

    def __init__(self) -> None:
        self.run = _Launcher()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: None


class _Function:
    """Stands for a function of `triton.jit`."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: _Compiled()


def _clear(modules: list[Any]) -> None:
    """Forget launches: they hold functions."""
    for module in modules:
        for name, value in vars(module).items():
            if hasattr(value, "cache_clear") and name.endswith(("launch", "plan", "_ready")):
                value.cache_clear()


def _register() -> None:
    """Add the Triton kernels as a backend that needs no device."""
    for op in OPS:
        for variant, declared in registry.ops()[op].variants.items():
            for each in declared.kernels:
                if each.backend == "triton":
                    registry.add(Kernel(op, variant, "fake", load=each.load, refuses=each.refuses))


@contextmanager
def faked() -> Iterator[None]:
    """Choose these kernels for the ops that a decoder layer has, inside the block."""
    names = [f"veomni_hook.kernels.{op}" for op in (*OPS, "layer_norm")]
    hosts, tiles = [], "veomni_hook.kernels.rms_norm.tiles"
    for host in (tiles, *(f"{name}.{part}" for name in names for part in ("triton", "plans"))):
        with suppress(ImportError):
            hosts.append(import_module(host))
    with ExitStack() as stack:
        stack.enter_context(registry.restored())
        stack.enter_context(STATE.restored())
        _register()
        for name in names:
            with suppress(ImportError):  # nn_layer_norm has those of layer_norm
                device = import_module(f"{name}.device")
            for each in ("forward", "forward_of_sum", "backward", "rotate", "add_up"):
                if hasattr(device, each):
                    stack.enter_context(mock.patch.object(device, each, _Function()))
        changes = {"_HANDLES": True, "_stream": lambda device: 7, "_device": lambda: 0}
        for name, value in changes.items():
            if hasattr(launch, name):
                stack.enter_context(mock.patch.object(launch, name, value))
        # Without `interpreter.check_launches`, which costs calls.
        stack.enter_context(mock.patch.object(launch.Launch, "__call__", unwrap(launch.Launch.__call__)))
        _clear(hosts)
        set_choice(CHOICE)
        try:
            yield
        finally:
            _clear(hosts)
