"""The hardware and software for which kernels are selected, as a value.

Only `System.detect` inspects the machine; everything else takes a `System` as an argument, so decisions for
any hardware can be tested on a laptop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from veomni_hook.accelerator import is_rocm, torch_version
from veomni_hook.errors import KernelError
from veomni_hook.releases import installed

__all__ = ["System"]

_CUDA = re.compile(r"sm(\d+)(\d)")
_NAME = re.compile(r"[\w.-]*")
_installed = cache(installed)


@dataclass(frozen=True)
class System:
    """A machine, as kernels see it.

    Attributes:
        device: a torch device type.
        capability: CUDA's (major, minor); None on ROCm, whose numbers mean others.
        torch: its version; empty if unknown.
        triton: its version; None if it is not installed.
        distributions: the installed versions, by name, of distributions that kernels require; None if all are
            assumed to be installed.
        rocm: whether the device type ``cuda`` stands for AMD's GPUs.
    """

    device: str
    capability: tuple[int, int] | None = None
    torch: str = ""
    triton: str | None = None
    distributions: Mapping[str, str] | None = field(default_factory=dict)
    rocm: bool = False

    @classmethod
    def detect(cls, device: str, distributions: Iterable[str] = ()) -> System:
        """Return this machine as a system for tensors of the torch device type ``device``.

        ``distributions`` are those to look for, with or without version requirements.
        """
        rocm, capability = device == "cuda" and is_rocm(), None
        if device == "cuda" and not rocm:
            import torch

            capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(
            device=device,
            capability=capability,
            torch=torch_version(),
            triton=_installed("triton"),
            distributions={
                name: version
                for name in map(_name, distributions)
                if (version := _installed(name)) is not None
            },
            rocm=rocm,
        )

    @classmethod
    def named(cls, name: str) -> System:
        """Return the system ``cpu``, ``smXY`` (a GPU of compute capability X.Y), ``rocm`` or ``ascend``.

        The software that kernels require is assumed to be installed. Raises KernelError for other names.
        """
        if name in ("cpu", "rocm"):
            rocm = name == "rocm"
            return cls("cuda" if rocm else "cpu", triton="assumed", distributions=None, rocm=rocm)
        if name == "ascend":
            return cls("npu", distributions=None)
        match = _CUDA.fullmatch(name.lower())
        if match is None:
            raise KernelError(
                f"there is no system {name!r}", where="--system", fix="cpu, sm80, sm90, sm100, rocm or ascend"
            )
        return cls("cuda", (int(match[1]), int(match[2])), triton="assumed", distributions=None)

    def lacks(self, requirement: str) -> str | None:
        """Return why a requirement (``name`` or ``name>=version``) is not met, or None."""
        if self.distributions is None:
            return None
        version = self.distributions.get(_name(requirement))
        if version is None:
            return f"needs {requirement}, which is not installed"
        if _name(requirement) == requirement:
            return None
        from packaging.requirements import Requirement

        fits = Requirement(requirement).specifier.contains(version, prereleases=True)
        return None if fits else f"needs {requirement}, found {version}"

    def __str__(self) -> str:
        words = [self.device, *(["ROCm"] if self.rocm else [])]
        if self.capability is not None:
            words.append(f"SM{self.capability[0]}{self.capability[1]}")
        if self.distributions is None:
            return ", ".join([*words, "all packages assumed"])
        words.append(f"torch {self.torch or 'unknown'}")
        words.append(f"triton {self.triton}" if self.triton else "no triton")
        return ", ".join(
            [*words, *(f"{name} {version}" for name, version in sorted(self.distributions.items()))]
        )


def _name(requirement: str) -> str:
    """Return the name of the distribution in a requirement."""
    match = _NAME.match(requirement)
    return match[0] if match else requirement
