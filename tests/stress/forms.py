"""The modules that generated ones are made from: each op's formulas, spelled plainly, with what to call.

Norms, experts, MLPs and routers are those of the idioms' tests, rotary functions and auxiliary losses the references'
own text; language models with their losses stand here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from types import ModuleType


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


def _models() -> list[Form]:
    texts = {
        name: _HEAD + _MODEL.replace("{body}", textwrap.indent(body, " " * 8))
        for name, body in _MODELS.items()
    }
    return [
        Form("losses", name, text, "SomeForCausalLM", "SomeForCausalLM.forward")
        for name, text in texts.items()
    ]


def _mlps() -> list[Form]:
    from tests.patches.idioms.test_gated_mlp import FORMULAS, module

    names = "nested", "step by step", "branch behind", "first half", "function", "float32", "clamped", "clamped after", "scaled sigmoid"  # fmt: skip
    texts = {name: module(FORMULAS[name][0]) for name in names}
    for old, new in (("(self, activation)", "(self)"), ("= activation", "= nn.SiLU()")):
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return [Form("MLPs", name, text, "SomeMLP", "SomeMLP.forward") for name, text in texts.items()]


def _routers() -> list[Form]:
    from tests.patches.idioms.test_moe_router import FORMULAS, module

    names = "softmax", "softmax, always divided", "softmax, never divided", "softmax of the largest", "bias", "groups", "groups, zero elsewhere"  # fmt: skip
    return [
        Form("routers", name, module(FORMULAS[name][0]), "SomeRouter", "SomeRouter.forward") for name in names
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
        "norms": _norms(), "rotary": _rotary(), "MLPs": _mlps(), "experts": _experts(), "routers": _routers(),
        "losses": _auxiliary() + _models(),
    }  # fmt: skip
