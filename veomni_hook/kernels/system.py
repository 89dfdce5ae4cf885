"""The hardware and software that kernels are chosen for, as a value.

Only `System.detect` looks at the machine; everything else takes a `System` as an argument, so that a decision
for any hardware can be tested on a laptop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from veomni_hook.errors import KernelError

__all__ = ["System"]

_CUDA = re.compile(r"sm(\d+)(\d)")


@dataclass(frozen=True)
class System:
    """A place where kernels run.

    Attributes:
        device: a torch device type.
        capability: CUDA's (major, minor).
        torch: its version; empty where it is not known.
        triton: its version; None where it is not installed.
        distributions: what is installed of that which kernels ask for; None where all of it is assumed to be.
    """

    device: str
    capability: tuple[int, int] | None = None
    torch: str = ""
    triton: str | None = None
    distributions: frozenset[str] | None = frozenset()

    @classmethod
    def detect(cls, device: str, distributions: Iterable[str] = ()) -> System:
        """Return the system that tensors of the torch device type ``device`` live on (imports torch).

        ``distributions`` are those to look for.
        """
        import torch

        on_cuda = device == "cuda" and torch.cuda.is_available()
        return cls(
            device=device,
            capability=torch.cuda.get_device_capability() if on_cuda else None,
            torch=str(torch.__version__),
            triton=_installed("triton"),
            distributions=frozenset(name for name in distributions if _installed(name)),
        )

    @classmethod
    def named(cls, name: str) -> System:
        """Return the system ``cpu``, ``smXY`` (a GPU of compute capability X.Y) or ``ascend``.

        What kernels ask for beside hardware is assumed to be installed. Raises KernelError for other names.
        """
        if name == "cpu":
            return cls("cpu", triton="assumed", distributions=None)
        if name == "ascend":
            return cls("npu", distributions=None)
        found = _CUDA.fullmatch(name.lower())
        if found is None:
            raise KernelError(
                f"no system is called {name!r}", where="--system", fix="cpu, sm80, sm90, sm100 or ascend"
            )
        return cls("cuda", (int(found[1]), int(found[2])), triton="assumed", distributions=None)

    def has(self, distribution: str) -> bool:
        """Whether ``distribution`` is installed there."""
        return self.distributions is None or distribution in self.distributions

    def __str__(self) -> str:
        words = [self.device]
        if self.capability is not None:
            words.append(f"SM{self.capability[0]}{self.capability[1]}")
        if self.distributions is None:
            return ", ".join([*words, "all packages assumed"])
        words.append(f"torch {self.torch or 'unknown'}")
        words.append(f"triton {self.triton}" if self.triton else "no triton")
        return ", ".join([*words, *sorted(self.distributions)])


@cache
def _installed(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
