"""A library that patches models as Liger does, in modules of Liger's names: on classes, modules and instances.

It computes what upstream computes. Liger itself needs a GPU.
"""

from __future__ import annotations

import sys
from types import MethodType, ModuleType

import torch
from torch import nn

NORM = """
import torch
from torch import nn

class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))
"""
MLP = """
class LigerSwiGLUMLP:
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""
ROPE = """
def _turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    import torch
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return _turned(q, cos, sin), _turned(k, cos, sin)
"""
LOSS = """
def lce_forward(self, input_ids=None, labels=None, **kwargs):
    from torch.nn.functional import cross_entropy
    logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
    return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}
"""
SOURCES = {"rms_norm": NORM, "swiglu": MLP, "rope": ROPE, "model.qwen3": LOSS}


class Liger:
    """What `liger_kernel.transformers.monkey_patch` does to Qwen3."""

    def __init__(self, monkeypatch) -> None:
        self.setattr = monkeypatch.setattr
        found = {}
        for name, source in {"": "", **SOURCES}.items():
            full = f"liger_kernel.transformers.{name}" if name else "liger_kernel"
            module = ModuleType(full)
            exec(compile(source, f"{full}.py", "exec"), vars(module))
            monkeypatch.setitem(sys.modules, full, module)
            found.update(vars(module))
        self.norm, self.mlp = found["LigerRMSNorm"], found["LigerSwiGLUMLP"]
        self.rotary, self.loss = found["liger_rotary_pos_emb"], found["lce_forward"]

    def to_modules(self, modeling: ModuleType, *, loss: bool = True) -> None:
        """Patch classes and functions, as before a model is made."""
        self.setattr(modeling, "apply_rotary_pos_emb", self.rotary)
        self.setattr(modeling, "Qwen3RMSNorm", self.norm)
        if loss:
            self.setattr(modeling.Qwen3ForCausalLM, "forward", self.loss)

    def to_model(self, model: nn.Module) -> None:
        """Patch the instances of a model that exists."""
        model.forward = MethodType(self.loss, model)
        for name, module in model.named_modules():
            if name.endswith("norm"):
                self.to_norm(module)
            elif name.endswith(".mlp"):
                vars(module)["forward"] = self.mlp.forward.__get__(module, type(module))

    def to_norm(self, module: nn.Module) -> None:
        """Patch one norm; as Liger does, without renaming its class, which tests share."""
        vars(module)["forward"] = self.norm.forward.__get__(module, type(module))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Compute a loss and its gradients."""
    model(**batch)["loss"].backward()
