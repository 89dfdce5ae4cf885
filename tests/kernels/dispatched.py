"""What runs: PyTorch's operators, and what traced graphs call; and that a GPU is not waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run inside of it; ``look`` gets the operator, its operands and result."""

    def __init__(self, look: Callable[[Any, tuple[Any, ...], Any], object] = lambda *_: None) -> None:
        super().__init__()
        self.names: list[str] = []
        self._look = look

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        result = function(*args, **(kwargs or {}))
        self._look(function, args, result)
        return result


def compiled(
    function: Any, backend: str = "aot_eager", *, fullgraph: bool = True, **options: Any
) -> tuple[Any, Any]:
    """The compiled function, and the counter of its graphs: dynamo's, with any backend."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=fullgraph, backend=counter, **options), counter


def nodes(counter: Any) -> Iterator[Any]:
    """The nodes of the graphs that a counter has seen, and of those inside (checkpoints, autograd functions)."""
    for graph in counter.graphs:
        for module in graph.modules():
            yield from module.graph.nodes if hasattr(module, "graph") else ()


def targets(counter: Any) -> list[str]:
    """What these nodes call."""
    return [str(node.target) for node in nodes(counter)]


@contextmanager
def without_waits() -> Iterator[None]:
    """Makes it an error that the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
