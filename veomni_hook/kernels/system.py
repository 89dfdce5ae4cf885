"""The hardware and software that kernels are chosen for, as a value.

Only `System.detect` looks at the machine; everything else takes a `System` as an argument, so that a decision
for any hardware can be tested on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["System"]


@dataclass(frozen=True)
class System:
    """A place where kernels run: ``device`` is a torch device type, ``capability`` CUDA's (major, minor)."""

    device: str
    capability: tuple[int, int] | None = None
    torch: str = ""
    triton: str | None = None

    @classmethod
    def detect(cls, device: str) -> System:
        """Return the system that tensors of the torch device type ``device`` live on (imports torch)."""
        import torch

        on_cuda = device == "cuda" and torch.cuda.is_available()
        return cls(
            device=device,
            capability=torch.cuda.get_device_capability() if on_cuda else None,
            torch=str(torch.__version__),
            triton=_installed("triton"),
        )

    def __str__(self) -> str:
        words = [self.device]
        if self.capability is not None:
            words.append(f"SM{self.capability[0]}{self.capability[1]}")
        words.append(f"torch {self.torch or 'unknown'}")
        words.append(f"triton {self.triton}" if self.triton else "no triton")
        return ", ".join(words)


def _installed(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
