"""Normalisations as a model's file may write them, one or more for each formula, not copied from upstream."""

import textwrap

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu as swish
from transformers.activations import ACT2FN
"""

_INIT = """
class SomeRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-5, group_size=4, scaled=True):
        super().__init__()
        self.weight = self.gain = nn.Parameter(torch.rand(size))
        self.eps = self.variance_epsilon = eps
        self.group_size, self.scaled, self.activation = group_size, scaled, "silu"
"""


def norm(methods: str, before: str = "") -> str:
    """A module with one class that has these methods."""
    return HEAD + before + _INIT + textwrap.indent(textwrap.dedent(methods).strip("\n"), "    ") + "\n"


NORM_METHOD = """
def _norm(self, v):
    return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)
"""

#: Variant (several, joined by |, if a flag chooses), and spellings of it.
FORMULAS: dict[str, list[str]] = {
    "cast_before_weight": [
        """
        def forward(self, h):
            kind = h.dtype
            h = h.to(torch.float32)
            power = h.pow(2).mean(-1, keepdim=True)
            h = h * torch.rsqrt(power + self.variance_epsilon)
            return self.weight * h.to(kind)
        """,
        NORM_METHOD
        + """
def forward(self, v):
    return self._norm(v.float()).type_as(v) * self.gain
""",
        """
        def forward(self, h):
            \"\"\"Checked first.\"\"\"
            if h.size(-1) != self.weight.numel():
                raise ValueError("size")
            power = torch.mean(h.float() * h.float(), dim=-1, keepdim=True)
            h = (h * (power + self.eps).rsqrt()).to(h.dtype)
            return torch.mul(h, self.weight)
        """,
        """
        def forward(self, h):
            return self.weight.to(h.device) * _rms(h, epsilon=self.eps)
        """,
    ],
    "weight_before_cast": [
        """
        def forward(self, h):
            kind = h.dtype
            h = h.float()
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
            return (self.weight * h).to(kind)
        """,
        NORM_METHOD
        + """
def forward(self, v):
    out = self._norm(v.float())
    out = out * self.weight.float()
    return out.type_as(v)
""",
    ],
    "weight_before_cast|unweighted": [
        """
        def _norm(self, v):
            return v * torch.pow(v.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)

        def forward(self, v):
            out = self._norm(v.float())
            if self.scaled:
                out = out * self.weight.float()
            return out.type_as(v)
        """,
        NORM_METHOD
        + """
def forward(self, v):
    if not self.scaled:
        return self._norm(v.float()).to(v.dtype)
    return (self._norm(v.float()) * self.weight).to(v.dtype)
""",
    ],
    "one_plus_weight": [NORM_METHOD + "\ndef forward(self, v):\n    return (self._norm(v.float()) * (1.0 + self.weight.float())).type_as(v)\n",
                        NORM_METHOD + "\ndef forward(self, v):\n    return ((1 + self.gain.float()) * self._norm(v.float())).to(v.dtype)\n"],
    "one_plus_weight_rounded": [NORM_METHOD + "\ndef forward(self, v):\n    return (self._norm(v.float()) * (1.0 + self.weight).float()).type_as(v)\n"],
    "one_plus_weight_before_norm": [NORM_METHOD + "\ndef forward(self, v):\n    w = v.float() * (1.0 + self.weight).float()\n    return self._norm(w.type_as(v).float()).type_as(v)\n"],
    "one_plus_weight|one_plus_weight_grouped": [
        """
        def _norm(self, v):
            if self.group_size is not None:
                v = v.reshape(*v.shape[:-1], -1, self.group_size)
            out = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)
            return out.flatten(-2) if self.group_size is not None else out

        def forward(self, v):
            return (self._norm(v.float()) * (1.0 + self.weight.float())).type_as(v)
        """
    ],
    "unweighted": [NORM_METHOD + "\ndef forward(self, v):\n    return self._norm(v.float()).type_as(v)\n"],
    "unweighted_rounded_scale": ["def forward(self, v):\n    return v * torch.rsqrt(v.float().square().mean(-1, keepdim=True) + self.eps).to(v.dtype)\n"],
    "inverse_rms": ["def forward(self, v):\n    return torch.rsqrt(v.float().square().mean(-1, keepdim=True) + self.eps).to(v.dtype)\n"],
    "cast_to_weight": [
        """
        def forward(self, h):
            power = h.to(torch.float32).pow(2).mean(-1, keepdim=True)
            h = h * torch.rsqrt(power + self.eps)
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                h = h.to(self.weight.dtype)
            return self.weight * h
        """
    ],
    "without_cast": ["def forward(self, v):\n    power = v.pow(2).mean(-1, keepdim=True)\n    return self.weight * v * torch.rsqrt(power + self.eps)\n"],
    "divided_by_root": ["def forward(self, v):\n    w = v.float()\n    w = w / torch.sqrt(w.pow(2).mean(-1, keepdim=True) + self.eps)\n    return (w * self.weight.float()).type_as(v)\n"],
    "cast_before_weight_gated": [
        f"""
        def forward(self, h, gate):
            kind = h.dtype
            h = h.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            h = self.weight * h.to(kind)
            h = h * {act}(gate.to(torch.float32))
            return h.to(kind)
        """
        for act in ("F.silu", "ACT2FN[self.activation]", "torch.sigmoid")
    ],
    "weight_before_cast_gated": [
        """
        def forward(self, h, gate=None):
            kind = h.dtype
            h = h.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            h = self.weight.to(torch.float32) * h
            h = h * ACT2FN[self.activation](gate.to(torch.float32))
            return h.to(kind)
        """
    ],
    "gate_before_norm": [
        """
        def forward(self, h, gate=None):
            kind = h.dtype
            h = h.to(torch.float32)
            if gate is not None:
                h = h * nn.functional.silu(gate.to(torch.float32))
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * h.to(kind)
        """
    ],
    "gate_before_norm_grouped": [
        """
        def forward(self, h, gate=None):
            kind = h.dtype
            h = h.to(torch.float32)
            if gate is not None:
                h = h * swish(gate.to(torch.float32))
            *front, last = h.shape
            groups = last // self.group_size
            g = h.view(*front, groups, self.group_size)
            g = g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + self.eps)
            h = g.view(*front, groups * self.group_size)
            return self.weight * h.to(kind)
        """
    ],
}  # fmt: skip

HELPER = """
def _rms(h, epsilon=1e-6):
    kind = h.dtype
    h = h.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
    return h.to(kind)
"""

#: Code that resembles a formula but computes something else, and the text in the report.
NEAR = {
    "cast swapped": ("return (self.weight * h.to(kind)).to(torch.float32)", "nearest"),
    "cast in between": ("return (self.weight.to(kind) * h).to(kind)", "nearest"),
    "two plus weight": ("return (h * (2.0 + self.weight.float())).to(kind)", "nearest is one_plus_weight"),
    "minus weight": ("return (h * (1.0 - self.weight.float())).to(kind)", "nearest"),
    "weight added": ("return self.weight + h.to(kind)", "nearest"),
    "bias": ("return self.weight * h.to(kind) + self.bias", "nearest"),
    "weight twice": ("return self.weight * self.weight * h.to(kind)", "nearest"),
    "another dtype": ("return self.weight * h.to(torch.bfloat16)", "nearest is cast_before_weight"),
}


def near(ending: str) -> str:
    """A class whose last statement is this."""
    return norm(
        f"""
        def forward(self, h):
            kind = h.dtype
            h = h.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            {ending}
        """
    )
