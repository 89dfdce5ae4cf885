"""The modules that generated ones are made from: each op's formulas, spelled plainly, with what to call.

Norms and experts are the lookalikes of the idioms' tests, rotary functions and auxiliary losses the references'
own text; MLPs, routers and language models with their losses stand here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from types import ModuleType

__all__ = ["Form", "forms"]


@dataclass(frozen=True)
class Form:
    """One formula as a module.

    Attributes:
        op: what is generated: norms, rotary, MLPs, experts, routers, losses, language models.
        name: the formula.
        source: the module's text.
        kind: the class of the plain form, which says how it is built and what it is called with.
        target: the definition that computes the formula; it and what it uses are spelled anew and perturbed.
        parameters: names of what the call takes, where inputs are made by them.
        owner: the class that is built and called, where it is another than `kind`.
    """

    op: str
    name: str
    source: str
    kind: str
    target: str
    parameters: tuple[str, ...] = ()
    owner: str = ""

    @property
    def called(self) -> str:
        """The class that is built and called."""
        return self.owner or self.kind


_HEAD = """import torch
import torch.nn.functional as F
from torch import nn
"""
_MLP = """
class SomeMLP(nn.Module):
    def __init__(self, width=6, inner=8):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=True)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width)
        self.gate_up_proj = nn.Linear(width, 2 * inner)
        self.norm = nn.LayerNorm(inner)
        self.act_fn = nn.SiLU()
        self.limit, self.alpha = 0.3, 1.7

    def forward(self, x):
{body}
"""
_HALVES = "gate, up = self.gate_up_proj(x).chunk(2, dim=-1)\n"
_MLPS = {
    "product": "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
    "product, step by step": "gate = self.act_fn(self.gate_proj(x))\nup = self.up_proj(x)\ny = gate * up\ny = self.down_proj(y)\nreturn y",
    "product of halves": f"{_HALVES}return self.down_proj(self.act_fn(gate) * up)",
    "product by a function": "return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))",
    "product with a norm": "y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)\ny = self.norm(y)\nreturn self.down_proj(y)",
    "product_float32": "gate, up = self.gate_proj(x), self.up_proj(x)\nreturn self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))",
    "clamped": "gate = self.gate_proj(x).clamp(max=self.limit)\nup = self.up_proj(x).clamp(min=-self.limit, max=self.limit)\nreturn self.down_proj(self.act_fn(gate) * up)",
    "clamped_after": "gate = self.act_fn(self.gate_proj(x)).clamp(max=self.limit)\nup = self.up_proj(x).clamp(min=-self.limit, max=self.limit)\nreturn self.down_proj(gate * up)",
    "scaled_sigmoid": f"{_HALVES}gate = gate.clamp(max=self.limit)\nup = up.clamp(min=-self.limit, max=self.limit)\n"
    "return self.down_proj((up + 1.0) * (gate * torch.sigmoid(gate * self.alpha)))",
}  # fmt: skip

_ROUTER = """
class SomeRouter(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, width))
        self.bias = nn.Parameter(torch.randn(8) * 0.1)
        self.top_k, self.num_experts, self.groups, self.kept_groups, self.scale = 3, 8, 4, 2, 2.5
        self.renormalise, self.epsilon = True, 1e-3

    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
{body}
"""
_SOFTMAX = "probs = F.softmax(logits, dim=-1, dtype=torch.float)\nweights, indices = torch.topk(probs, self.top_k, dim=-1)\n"
_BIASED = (
    "scores = logits.float().sigmoid()\n_, indices = torch.topk(scores + self.bias, self.top_k, sorted=False)\n"
    "weights = scores.gather(1, indices)\n"
)
_GROUPED = (
    "scores = logits.sigmoid()\nchoice = scores + self.bias\n"
    "best = choice.view(-1, self.groups, self.num_experts // self.groups).topk(2, dim=-1)[0].sum(-1)\n"
    "group = torch.topk(best, k=self.kept_groups, dim=-1, sorted=False).indices\n"
    "mask = torch.zeros_like(best)\nmask.scatter_(1, group, 1)\n"
    "mask = mask.unsqueeze(-1).expand(-1, self.groups, self.num_experts // self.groups)\n"
    "choice = choice.masked_fill(~mask.reshape(-1, self.num_experts).bool(), 0.0)\n"
    "indices = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]\nweights = scores.gather(1, indices)\n"
)
_ROUTERS = {
    "softmax_topk": f"{_SOFTMAX}if self.renormalise:\n    weights /= weights.sum(dim=-1, keepdim=True)\nreturn logits, weights.to(logits.dtype), indices",
    "softmax_topk, always divided": f"{_SOFTMAX}weights = weights / weights.sum(-1, keepdim=True)\nreturn weights, indices",
    "softmax_topk, never divided": f"{_SOFTMAX}return indices, weights * self.scale",
    "topk_softmax": "values, indices = logits.topk(self.top_k, dim=-1)\nweights = torch.softmax(values, dim=-1)\nreturn logits, weights, indices",
    "biased_topk": f"{_BIASED}weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)\nreturn indices, weights * self.scale",
    "grouped_topk": f"{_GROUPED}if self.renormalise:\n    total = weights.sum(dim=-1, keepdim=True) + 1e-20\n    weights /= total\n"
    "weights = weights * self.scale\nreturn logits, weights, indices",
}  # fmt: skip

_MODEL = """
from types import SimpleNamespace
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast


class SomeForCausalLM(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self, width=8):
        super().__init__()
        self.model, self.lm_head = nn.Linear(width, width), nn.Linear(width, 11, bias=False)
        self.config = SimpleNamespace(vocab_size=11, final_logit_softcapping=2.0, logits_scaling=0.7)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x, labels=None, logits_to_keep=0, **kwargs):
        hidden_states = self.model(x)
{body}
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""
_MODELS = {
    "next_token": "logits = self.lm_head(hidden_states)",
    "next_token, kept": "slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep\n"
    "logits = self.lm_head(hidden_states[:, slice_indices, :])",
    "next_token, scaled": "logits = self.lm_head(hidden_states)\nlogits = logits / self.config.logits_scaling",
    "next_token, multiplied": "logits = self.lm_head(hidden_states) * self.config.logits_scaling",
    "next_token, capped": "logits = self.lm_head(hidden_states)\nif self.config.final_logit_softcapping is not None:\n"
    "    logits = logits / self.config.final_logit_softcapping\n    logits = torch.tanh(logits)\n"
    "    logits = logits * self.config.final_logit_softcapping",
    "next_token, in float32": "logits = self.lm_head(hidden_states).float()",
}  # fmt: skip
_AUXILIARY = """
class SomeMoE(nn.Module):
    def forward(self, first, second, mask=None):
        return load_balancing_loss_func((first, second), 5, 2, mask)
"""


def _bodies(op: str, template: str, bodies: dict[str, str], owner: str) -> list[Form]:
    return [
        Form(
            op,
            name,
            _HEAD + template.replace("{body}", textwrap.indent(body, " " * 8)),
            owner,
            f"{owner}.forward",
        )
        for name, body in bodies.items()
    ]


def _norms() -> list[Form]:
    from tests.patches.idioms.norm_lookalikes import FORMULAS, HELPER, norm

    return [
        Form(
            "norms",
            name,
            norm(spelling, HELPER if "_rms(" in spelling else ""),
            "SomeRMSNorm",
            "SomeRMSNorm.forward",
        )
        for name, spellings in FORMULAS.items()
        for spelling in spellings
    ]


def _experts() -> list[Form]:
    from tests.patches.idioms.experts_lookalikes import LOOKALIKES

    return [
        Form("experts", name, one.source, "BankExperts", "BankExperts.forward")
        for name, one in LOOKALIKES.items()
    ]


def _text_of(module: ModuleType, name: str, new: str) -> str:
    """A function of a module under a new name, with the functions of the module that it uses before it."""
    tree = ast.parse(inspect.getsource(module))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: list[str] = []

    def add(one: str) -> None:
        for node in ast.walk(functions[one]):
            if isinstance(node, ast.Name) and node.id in functions and node.id not in (one, *found):
                add(node.id)
        found.append(one)

    add(name)
    texts = []
    for one in found:
        node = functions[one]
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            del node.body[0]
        node.name = new if one == name else one
        texts.append(ast.unparse(node) + "\n")
    return "\n\n".join(texts)


#: Functions for which no inputs are made.
_UNCALLED = ("half_split_first_positions_single", "half_split_gathered", "half_split_of_angles_fp32_single")


def _rotary() -> list[Form]:
    from veomni_hook.kernels.rotary import reference
    from veomni_hook.kernels.rotary.variants import VARIANTS

    found = []
    for name in VARIANTS:
        function = getattr(reference, name)
        parameters = inspect.signature(function).parameters
        if name in _UNCALLED or any(
            word in parameters for word in ("mrope_section", "num_heads", "hidden_states")
        ):
            continue
        text = _text_of(reference, name, "apply_rotary_pos_emb")
        signature = [
            one.name if one.default is one.empty else f"{one.name}={one.default!r}"
            for one in parameters.values()
        ]
        taken = [
            one.name if one.default is one.empty else f"{one.name}={one.name}" for one in parameters.values()
        ]
        caller = (
            f"\n\nclass SomeAttention(nn.Module):\n    def forward(self, {', '.join(signature)}):\n"
            f"        return apply_rotary_pos_emb({', '.join(taken)})\n"
        )
        head = f"{_HEAD}\nTensor = torch.Tensor\nTensors = tuple\n\n\n"
        source = head + text + caller
        found.append(Form("rotary", name, source, "SomeAttention", "apply_rotary_pos_emb", tuple(parameters)))
    return found


def _auxiliary() -> list[Form]:
    from veomni_hook.kernels.load_balancing_loss import reference, spellings

    head = f"{_HEAD}from torch.nn import functional\nLogits = object\n\n\n"
    return [
        Form("losses", name, head + _text_of(module, name, "load_balancing_loss_func") + _AUXILIARY, "SomeMoE", "load_balancing_loss_func")
        for module, name in ((reference, "softmax_topk_in_dtype"), (spellings, "by_bincount"), (spellings, "by_histc"))
    ]  # fmt: skip


@cache
def forms() -> dict[str, list[Form]]:
    """Every form, by op."""
    return {
        "norms": _norms(),
        "rotary": _rotary(),
        "MLPs": _bodies("MLPs", _MLP, _MLPS, "SomeMLP"),
        "experts": _experts(),
        "routers": _bodies("routers", _ROUTER, _ROUTERS, "SomeRouter"),
        "losses": _auxiliary() + _bodies("losses", _MODEL, _MODELS, "SomeForCausalLM"),
    }
