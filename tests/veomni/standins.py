"""Stand-ins in plain torch for the packages that VeOmni's models import and a CPU cannot have.

They make the models run, so that both sides can be compared; they say nothing about the packages themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x * scale * gamma, scale


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Tensor:
    assert rotary_mode == "half"
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return npu_rotary_mul(q, cos, sin), npu_rotary_mul(k, cos, sin)


class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return npu_rms_norm(x, self.weight, self.variance_epsilon)[0]


class LigerSwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "torch_npu": {"torch_npu": {"npu_rms_norm": npu_rms_norm, "npu_rotary_mul": npu_rotary_mul}},
    "liger_kernel": {
        "liger_kernel": {},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.rms_norm": {"LigerRMSNorm": LigerRMSNorm},
        "liger_kernel.transformers.swiglu": {"LigerSwiGLUMLP": LigerSwiGLUMLP},
        "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": liger_rotary_pos_emb},
    },
}

#: What `torch_npu` adds to torch, for those that ask it whether there is an NPU.
_IN_TORCH = """
import types
import torch

torch.Tensor.npu = lambda self: self
torch.npu = types.SimpleNamespace(is_available=lambda: False, config=types.SimpleNamespace())
"""


def install(package: str, folder: Path) -> None:
    """Write the stand-in for a package to a folder of `PYTHONPATH`, for a process that only trains."""
    for name, members in MODULES.get(package, {}).items():
        home = folder.joinpath(*name.split("."))
        home.mkdir(parents=True)
        # By name: whoever looks for a member reads the text.
        text = "".join(f"from tests.veomni.standins import {member}\n" for member in members)
        text += _IN_TORCH if package == "torch_npu" else ""
        (home / "__init__.py").write_text(text, encoding="utf-8")


@contextmanager
def stand_ins(package: str) -> Iterator[None]:
    """Let ``import package`` find the stand-in meanwhile; for an empty name, nothing changes."""
    made: dict[str, ModuleType] = {}
    for name, members in MODULES.get(package, {}).items():
        made[name] = ModuleType(name)
        vars(made[name]).update(members)
    sys.modules.update(made)
    moving = mock.patch.object(Tensor, "npu", lambda self: self, create=True)
    try:
        with moving if package == "torch_npu" else nullcontext():
            yield
    finally:
        for name in made:
            del sys.modules[name]
