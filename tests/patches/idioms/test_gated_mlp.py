from functools import partial

import pytest
import torch
from torch import nn

from tests.patches.idioms.applied import (
    IMPORTS,
    assert_missed,
    assert_routed,
    class_of,
    compared,
    in_lines,
    site_of,
    sites_of,
    spliced,
)  # fmt: skip
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import gated_mlp

SETUP = """
self.gate_proj = nn.Linear(6, 8, bias=True)
self.up_proj = nn.Linear(6, 8, bias=False)
self.down_proj = nn.Linear(8, 6)
self.gate_up_proj = nn.Linear(6, 16)
self.norm = nn.LayerNorm(8)
self.drop = nn.Dropout(0.5)
self.act_fn = activation
self.limit, self.alpha = 0.3, 1.7
"""
HALVES = "gate, up = self.gate_up_proj(x).chunk(2, dim=-1)\n"
# Body of forward(self, x), variant, and the expected text of the guard.
FORMULAS = {
    "nested": (
        "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
        "product",
        "return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.act_fn))",
    ),
    "by name": (
        "y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\nreturn y",
        "product",
        "return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.act_fn))",
    ),
    "step by step": (
        "a = self.act_fn(self.gate_proj(x))\nx = self.up_proj(x)\nx = a * x\nreturn self.down_proj(x)",
        "product",
        "return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.act_fn))",
    ),
    "up first": (
        "return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))",
        "product",
        "kernel(up=self.up_proj(x), gate=self.gate_proj(x), activation=self.act_fn)",
    ),
    "after it": (
        "y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)\ny = self.drop(self.norm(y))\n"
        "y = self.down_proj(y)\nreturn self.drop(y) * self.alpha",
        "product",
        "return self.drop(self.down_proj(self.drop(self.norm(kernel(",
    ),
    "branch behind": (
        "y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)\nif self.training:\n    y = self.drop(y)\n"
        "return self.down_proj(y)",
        "product",
        "y = kernel(self.gate_proj(x), self.up_proj(x), self.act_fn)\n    else:",
    ),
    "first half": (HALVES + "return self.down_proj(up * self.act_fn(gate))", "product", "return self.down_proj(kernel(gate, up, self.act_fn))"),
    "second half": (HALVES + "return self.down_proj(self.act_fn(up) * gate)", "product", "return self.down_proj(kernel(up, gate, self.act_fn))"),
    "function": ("return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))", "product", "kernel(self.gate_proj(x), self.up_proj(x), F.silu)"),
    "float32": (
        "gate, up = self.gate_proj(x), self.up_proj(x)\n"
        "return self.down_proj((self.act_fn(gate.float()) * up.to(torch.float32)).type_as(gate))",
        "product_float32",
        "return self.down_proj(kernel(gate, up, self.act_fn))",
    ),
    "clamped": (
        "gate = torch.clamp(self.gate_proj(x), max=self.limit)\n"
        "up = self.up_proj(x).clamp(-self.limit, self.limit)\nreturn self.down_proj(self.act_fn(gate) * up)",
        "clamped",
        "return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.act_fn, self.limit))",
    ),
    "clamped after": (
        "gate = self.act_fn(self.gate_proj(x)).clamp(max=self.limit)\n"
        "up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)\nreturn self.down_proj(gate * up)",
        "clamped_after",
        "return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x), self.act_fn, self.limit))",
    ),
    "scaled sigmoid": (
        HALVES + "gate = gate.clamp(max=self.limit)\nup = up.clamp(min=-self.limit, max=self.limit)\n"
        "return self.down_proj((up + 1.0) * (gate * torch.sigmoid(gate * self.alpha)))",
        "scaled_sigmoid",
        "return self.down_proj(kernel(gate, up, self.alpha, self.limit))",
    ),
    # Unknown clamps stay upstream's code, around the part that goes to the kernel.
    "other limits": (
        "gate = self.gate_proj(x).clamp(max=self.limit)\nup = self.up_proj(x).clamp(min=-self.alpha, max=self.limit)\n"
        "return self.down_proj(self.act_fn(gate) * up)",
        "product",
        "kernel(gate, up, self.act_fn)",
    ),
    "the name is taken": ("kernel = 2.0\nreturn self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * kernel", "product", "if (veomni_kernel := "),
    "two products": (
        "y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)\ny = self.down_proj(y)\n"
        "z = self.act_fn(self.gate_proj(x)) * self.up_proj(x)\nreturn y + self.down_proj(z)",
        "product",
        "y = kernel(self.gate_proj(x), self.up_proj(x), self.act_fn)\n    else:",
    ),
}  # fmt: skip
NEAR_MISSES = {
    "activation of the product": "return self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))",
    "sigmoid by hand": "gate = self.gate_proj(x)\nreturn self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))",
    "used twice": "gate = self.act_fn(self.gate_proj(x))\ny = self.down_proj(gate * self.up_proj(x))\nreturn y + gate.sum()",
    "something between": (
        "gate = self.act_fn(self.gate_proj(x))\nx = self.norm(gate).sum(-1, keepdim=True) + x\n"
        "return self.down_proj(gate * self.up_proj(x))"
    ),
}  # fmt: skip


X = (3, 4, 6)
SILU, GELU = nn.SiLU(), nn.GELU(approximate="tanh")


def module(body, name="SomeMLP"):
    body = f"# upstream's comment\n{body}"
    return class_of(name, SETUP, "forward(self, x)", body, arguments=", activation")


def tower(body, parameters="x, cu_seqlens"):
    return module(body) + (
        f"class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.mlp = SomeMLP(torch.relu)\n\n    def forward(self, {parameters}):\n        return self.mlp(x)\n"
    )


only = partial(site_of, gated_mlp)
sites = partial(sites_of, gated_mlp)


def outcome_of(text, activation=SILU, dtype=torch.float32, change=lambda layer: None):
    return compared(
        text, sites(text), "SomeMLP", [X], arguments=(activation,), dtype=dtype, change=change
    ).get("gated_mlp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [SILU, GELU], ids=["silu", "gelu"])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_guarded_path_is_the_upstream_one(name, activation, dtype):
    set_choice("gated_mlp=reference")
    body, variant, guard = FORMULAS[name]
    assert_routed(gated_mlp, module(body), variant, "SomeMLP.forward", guard)
    assert outcome_of(module(body), activation, dtype).backend == "reference"


@pytest.mark.parametrize("name", ["nested", "up first", "branch behind", "function", "clamped"])
def test_a_kernel_for_silu_takes_silu_only(name):
    set_choice("gated_mlp=torch")
    for activation, backend in ((SILU, "torch"), (GELU, "eager")):
        outcome = outcome_of(module(FORMULAS[name][0]), activation)
        assert outcome.backend == ("torch" if name == "function" else backend)


class WithAdapter(nn.Module):
    """A projection as PEFT wraps it: random numbers are drawn in the order of the calls."""

    def __init__(self, base):
        super().__init__()
        self.base, self.calls = base, 0

    def forward(self, x):
        self.calls += 1
        return self.base(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("name", ["nested", "step by step", "up first", "branch behind", "clamped"])
def test_wrapped_projections_run_once_and_in_order(name):
    set_choice("gated_mlp=reference")
    wrapped = []

    def wrap(layer):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            wrapped.append(WithAdapter(getattr(layer, projection)))
            setattr(layer, projection, wrapped[-1])

    outcome_of(module(FORMULAS[name][0]), change=wrap)
    assert [each.calls for each in wrapped] == [1] * 6


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_counted_and_not_routed(name):
    assert_missed(gated_mlp, module(NEAR_MISSES[name]), "line" if name == "activation of the product" else "")


def test_other_names_count_where_projections_are_multiplied():
    text = (
        f"{IMPORTS}class SomeBlock(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w1, self.w2 = None, None\n        self.w1 = nn.Linear(2, 2)\n        self.w3 = nn.Linear(2, 2)\n"
        "    def forward(self, x):\n        return F.silu(self.w1(x)) * self.w3(x)\n"
        "class Gate(nn.Module):\n    def __init__(self):\n        self.gate = nn.Linear(2, 2)\n"
        "    def forward(self, x, y):\n        return F.silu(self.gate(x)) * y\n"
    )
    named = text.replace("F.silu(self", "F.silu(input=self")
    local = text.replace("self.w3 = nn.Linear(2, 2)", "made = nn.Linear(2, 2)\n        self.w3 = made")
    walrus = text.replace("* self.w3(x)", "* (up := self.w3(x))")
    for each in (text, named, local, walrus):
        assert [site.target for site in sites(each)] == ["SomeBlock.forward"]


def test_stacked_weights_are_experts():
    text = module(FORMULAS["nested"][0]).replace(
        "self.limit", "self.stacked = nn.Parameter(torch.empty(2, 3, 4))\n        self.limit", 1
    )
    assert sites(text) == []


def test_digests_do_not_depend_on_names():
    one = only(module(FORMULAS["nested"][0]))
    other = only(module(FORMULAS["by name"][0].replace("y", "result")))
    assert one.form == other.form != only(module(FORMULAS["clamped"][0])).form


TOGETHER = "kernel(*veomni_gated_mlp_product.projected(self.gate_proj, self.up_proj, x), self.act_fn)"


@pytest.mark.parametrize(
    ("body", "parameters", "together"),
    [
        ("nested", "x, cu_seqlens", True),
        ("nested", "x, *, cu_seqlens_of_windows=None", True),
        ("nested", "x", False),
        ("step by step", "x, cu_seqlens", True),
        ("branch behind", "x, cu_seqlens", True),
        # The slot calls the projections in this order only.
        ("up first", "x, cu_seqlens", False),
        ("other limits", "x, cu_seqlens", False),
    ],
)
def test_slots_call_the_projections_of_towers(body, parameters, together):
    text, _, _ = FORMULAS[body]
    assert (
        TOGETHER in in_lines(spliced(tower(text, parameters), sites(tower(text, parameters))))
    ) is together


def test_projections_of_different_inputs_are_called_by_the_code():
    text = "y = x * 2\nreturn self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(y))"
    assert "projected" not in spliced(tower(text), sites(tower(text)))


def test_a_tower_computes_what_upstream_does():
    set_choice("gated_mlp=reference")
    assert outcome_of(tower(FORMULAS["nested"][0])).backend == "reference"
