import re
from functools import partial

import pytest
import torch

from tests.patches.idioms import applied
from tests.patches.idioms.applied import changed, compared, executed, in_lines, sites_of, spliced
from tests.patches.idioms.experts_lookalikes import (
    BATCHED,
    COMBINED,
    GROUPED,
    HEAD,
    LOOKALIKES,
    MODULES,
    OR_IDENTITY,
    SHARED,
)
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.idioms.moe_experts import find as moe_experts
from veomni_hook.patches.site import Status

COUNT, WIDTH, INNER, TOKENS, TOP_K = 5, 8, 6, 19, 3
GATED = LOOKALIKES["gated"].source


@pytest.fixture(autouse=True)
def _references():
    set_choice("moe_experts=reference")
    with registry.restored():  # combinations become variants
        yield


site_of = partial(applied.site_of, moe_experts)


def reason_of(source):
    site = site_of(source)
    assert site.status is Status.MISSED and not site.edits
    return site.reason


def calls(dtype=torch.float32, sentinel=COUNT - 1):
    """``rows, chosen, shares``; ids up to ``sentinel``."""
    chosen = torch.randint(0, sentinel + 1, (TOKENS, TOP_K))
    chosen[chosen == 1] = 0
    return [torch.randn(TOKENS, WIDTH).to(dtype), chosen, torch.rand(TOKENS, TOP_K).to(dtype)]


def assert_runs_alike(source, site, sentinel=COUNT - 1):
    """Check that the guarded module computes upstream's bits, and that the reference kernel ran."""
    for dtype in (torch.float32, torch.bfloat16):
        outcomes = compared(
            source, [site], "BankExperts", calls(dtype, sentinel), arguments=(COUNT, WIDTH, INNER),
            dtype=dtype,
        )  # fmt: skip
        assert outcomes["moe_experts"].backend == "reference"


EVERY = LOOKALIKES | COMBINED
every_variant = pytest.mark.parametrize("variant", EVERY)


@every_variant
def test_recognises(variant):
    site = site_of(EVERY[variant].source)
    assert (site.status, site.variant, site.target) == (Status.ROUTED, variant, "BankExperts.forward")
    assert tuple(site.captures.values()) == ("rows", "chosen", "shares", *EVERY[variant].operands)
    assert [slot.name for slot in site.slots] == [f"veomni_moe_experts_{variant}"]
    assert site.counted and site.form


@every_variant
def test_the_guard_computes_what_upstream_computes(variant):
    source = EVERY[variant].source
    assert_runs_alike(source, site_of(source), sentinel=COUNT)


@every_variant
def test_a_mask_without_the_sentinel_makes_no_difference(variant):
    source = changed(EVERY[variant].source, ("num_classes=self.count + 1", "num_classes=self.count"))
    site = site_of(source)
    assert site.form == site_of(EVERY[variant].source).form
    assert_runs_alike(source, site)


def test_variants_have_forms_of_their_own():
    assert len({site_of(each.source).form for each in EVERY.values()}) == len(EVERY)


LOOP_OF_NAMES = [
    [("            bank = bank[0]\n", "            bank = bank.item()\n")],
    [(".nonzero()", ".nonzero(as_tuple=False)"), ("bank = bank[0]", "number = int(bank.item())"),
     ("bank == self.count", "number == self.count"), ("places[bank]", "places[number]"),
     ("first[bank]", "first[number]"), ("second[bank]", "second[number]")],
    [(".nonzero()", ".nonzero().squeeze(-1)"), ("bank = bank[0]", "bank = bank.item()")],
    [("            if bank == self.count:\n                continue\n", "")],
    [("            gate, up", "            if row.numel() == 0:\n                continue\n            gate, up")],
    [("        with torch.no_grad():\n            places = fn", "        if True:\n            places = fn"),
     ("        if True:\n            places", "        places"), ("            places = places", "        places = places"),
     ("            used", "        used")],
    [("torch.zeros_like(rows)", "torch.zeros_like(rows, dtype=rows.dtype, device=rows.device)")],
    [("out.to(total.dtype)", "out.to(rows.dtype)")],
    [("out.to(total.dtype)", "out")],
    [("return total", "return total.to(rows.dtype)")],
    [("        total = torch.zeros_like(rows)\n", "        kind = rows.dtype\n        total = torch.zeros_like(rows)\n"),
     ("return total", "return total.to(kind)")],
    [("import torch.nn.functional as fn\n", ""), ("fn.", "torch.nn.functional.")],
    [("rows[row]", "state"), ("            gate, up", "            state = rows[row]\n            gate, up")],
    [("rows[row]", "rows[None, row].reshape(-1, rows.shape[-1])")],
    [("self.act(gate) * up", "up * self.act(gate)")],
    [("places[bank])", "places[bank].squeeze(0))")],
    [("        total = torch.zeros_like(rows)\n",
      "        total = torch.zeros_like(rows)\n        if chosen.numel() == 0:\n            return total\n")],
    [("def forward(self, rows, chosen, shares)", "def forward(self, rows: torch.Tensor, chosen=None, shares=None)"),
     ("        total =", '        """What it does."""\n        total =')],
    [("rows", "hidden_states"), ("chosen", "kernel"), ("total", "operands")],
]  # fmt: skip


@pytest.mark.parametrize("changes", LOOP_OF_NAMES)
def test_the_same_written_otherwise(changes):
    source = changed(GATED, *changes)
    site = site_of(source)
    assert (site.status, site.variant) == (Status.ROUTED, "gated")
    assert site.form == site_of(GATED).form
    assert_runs_alike(source, site)


NEAR_MISSES = {
    "places for weights": ("shares[row, slot, None]", "slot[row, slot, None]"),
    "another mask": ("permute(2, 1, 0)", "permute(2, 0, 1)"),
    "ids moved": ("one_hot(chosen,", "one_hot(chosen - 1,"),
    "experts with two tokens": ("sum(dim=(-1, -2)), 0)", "sum(dim=(-1, -2)), 1)"),
    "sum over one dimension": ("sum(dim=(-1, -2))", "sum(dim=-1)"),
    "the other expert's tokens": ("torch.where(places[bank])", "torch.where(places[0])"),
    "always one expert": ("self.first[bank]", "self.first[0]"),
    "place and token exchanged": ("slot, row =", "row, slot ="),
    "rows of places": ("rows[row]", "rows[slot]"),
    "weights of other places": ("shares[row, slot, None]", "shares[slot, row, None]"),
    "weights without a dimension": ("shares[row, slot, None]", "shares[row, slot]"),
    "no weights": ("out = out * shares[row, slot, None]", "out = out * 1.5"),
    "weights twice": ("out * shares[row, slot, None]", "out * shares[row, slot, None] * shares[row, slot, None]"),
    "first expert left out": ("if bank == self.count:", "if bank == 0:"),
    "last expert left out": ("if bank == self.count:", "if bank == self.count - 1:"),
    "stops at the sentinel": ("                continue", "                break"),
    "begins with ones": ("torch.zeros_like(rows)", "torch.ones_like(rows)"),
    "begins with its input": ("torch.zeros_like(rows)", "rows.clone()"),
    "added up in float32": ("torch.zeros_like(rows)", "torch.zeros_like(rows, dtype=torch.float32)"),
    "on another device": ("torch.zeros_like(rows)", 'torch.zeros_like(rows, device="cpu")'),
    "returns twice the result": ("return total", "return total * 2"),
    "returns float32": ("return total", "return total.float()"),
    "adds along another dimension": ("total.index_add_(0,", "total.index_add_(1,"),
    "subtracts": ("out.to(total.dtype))", "out.to(total.dtype), alpha=-1)"),
    "writes over": ("total.index_add_(0, row,", "total.index_copy_(0, row,"),
    "adds at places": ("total.index_add_(0, row,", "total.index_add_(0, slot,"),
    "rounds on the way": ("out = out * shares", "out = out.half() * shares"),
    "up is activated": ("self.act(gate) * up", "gate * self.act(up)"),
    "the product is activated": ("self.act(gate) * up", "self.act(gate * up)"),
    "sum, not product": ("self.act(gate) * up", "self.act(gate) + up"),
    "no activation": ("self.act(gate) * up", "gate * up"),
    "the activation in float32": ("self.act(gate) * up", "self.act(gate.float()).to(gate.dtype) * up"),
    "four parts": ("chunk(2, dim=-1)", "chunk(4, dim=-1)[:2]"),
    "split over tokens": ("chunk(2, dim=-1)", "chunk(2, dim=0)"),
    "a bias": ("self.second[bank])", "self.second[bank]) + self.second[bank, 0]"),
    "scaled": ("self.act(gate) * up", "self.act(gate) * up * 0.5"),
    "residual": ("self.second[bank])", "self.second[bank]) + rows[row]"),
    "all rows": ("self.second[bank])", "self.second[bank]) + rows.mean()"),
    "sees the result so far": ("self.second[bank])", "self.second[bank]) + total[row]"),
    "depends on the number": ("self.act(gate) * up", "self.act(gate) * up * bank"),
    "the down projection transposed": ("fn.linear(out, self.second[bank])", "out @ self.second[bank]"),
    "without gradient": ("            out = self.act", "            with torch.no_grad():\n                out = self.act"),
    "added without gradient": ("            total.index", "            with torch.no_grad():\n                total.index"),
    "keeps a value": ("            out = self.act", "            self.last = gate\n            out = self.act"),
    "changes its input": ("            out = self.act", "            rows[row] = 0\n            out = self.act"),
    "changes the weights": ("            out = self.act", "            shares = shares * 0.5\n            out = self.act"),
    "changes in place": ("            out = self.act", "            gate.mul_(2)\n            out = self.act"),
    "changes by an operator": ("            out = self.act", "            gate *= 2\n            out = self.act"),
    "prints": ("            out = self.act", "            print(bank)\n            out = self.act"),
    "chooses by a flag": ("out = self.act(gate) * up", "out = self.act(gate) * up if self.training else up"),
    "chooses by two flags": ("out = self.act(gate) * up", "out = self.act(gate) * up if self.training else (up if self.odd else gate)"),
    "a branch": ("        for bank in used", "        if self.training:\n            return total\n        for bank in used"),
    "input scaled first": ("        total = torch", "        rows = rows * 2\n        total = torch"),
    "weights scaled first": ("        total = torch", "        shares = shares * 2\n        total = torch"),
    "input scaled later": ("        for bank in used", "        rows = rows * 2\n        for bank in used"),
    "stacked over something else": ("torch.randn(self.count, 2", "torch.randn(self.count + 1, 2"),
    "a mask of other width": ("num_classes=self.count + 1", "num_classes=self.other"),
    "another loop": ("        return total", "        for _ in used:\n            total = total * 2\n        return total"),
    "else": ("        return total", "        else:\n            total = total * 2\n        return total"),
    "one mask for two": ("            used =", "            places[0] = 0\n            used ="),
    "weights as a function": ("self.act(gate)", "shares(gate)"),
    "ids of the module": ("one_hot(chosen,", "one_hot(table,"),
    "in another dtype": ("torch.zeros_like(rows)", "torch.zeros_like(rows, dtype=shares.kind)"),
    "stops where something else is empty": (
        "        with torch.no_grad", "        if table.numel() == 0:\n            return total\n        with torch.no_grad"
    ),
    "returns its input where nobody chose": (
        "        with torch.no_grad", "        if chosen.numel() == 0:\n            return rows\n        with torch.no_grad"
    ),
    "a product without gradient": ("            places = places", "            first = self.first * 2\n            places = places"),
    "hides torch": ("from torch import nn\n", "from torch import nn\nfrom elsewhere import functional as fn\n"),
}  # fmt: skip


def test_a_computed_value_has_no_place_in_a_formula():
    source = changed(GATED, NEAR_MISSES["a product without gradient"], ("self.first[bank]", "first[bank]"))
    reason_of(source)


@pytest.mark.parametrize("name", [name for name in NEAR_MISSES if name != "a product without gradient"])
def test_near_misses(name):
    assert reason_of(changed(GATED, NEAR_MISSES[name]))


def test_a_miss_says_what_is_nearest_and_where_it_differs():
    reason = reason_of(changed(GATED, NEAR_MISSES["scaled"]))
    assert re.fullmatch(r"nearest is gated\w*: expected .* found .*second.* \(line \d+\)", reason)
    line = 1 + GATED[: GATED.index("if bank")].count("\n")
    reason = reason_of(changed(GATED, NEAR_MISSES["first expert left out"]))
    assert reason == f"nearest is gated: it does not add every expert's rows to the result (line {line})"


def test_a_clamp_on_the_other_side_is_another_variant():
    source = LOOKALIKES["gated_clamped_after"].source
    moved = changed(
        source,
        ("fn.silu(gate).clamp(max=self.bound)", "gate.clamp(max=self.bound)"),
        ("out = gate *", "out = fn.silu(gate) *"),
    )
    assert site_of(source).variant == "gated_clamped_after"
    assert site_of(moved).variant == "gated_clamped"


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gated_clamped", ("gate.clamp(max=self.bound)", "gate.clamp(max=2 * self.bound)")),
        ("gated_clamped", ("up.clamp(min=-self.bound, max=self.bound)", "up.clamp(max=self.bound)")),
        ("alpha_gated", ("up + 1.0", "up + 2.0")),
        ("alpha_gated", ("gate * self.slope", "up * self.slope")),
        (
            "biased_interleaved_alpha_gated",
            ("both[..., ::2], both[..., 1::2]", "both[..., 1::2], both[..., ::2]"),
        ),
        ("biased_interleaved_alpha_gated", (" + self.second_bias[bank]", "")),
        ("biased_interleaved_alpha_gated", ("self.first_bias[bank]", "self.first_bias[0]")),
        ("biased_alpha_gated_float32", ("rows[row].float()", "rows[row]")),
        ("gated_jointly", (", dtype=torch.float32", "")),
        ("gated_normalised", ("self.norm(out)", "self.norm(rows[row])")),
        ("ungated", ("dtype=shares.dtype", "dtype=shares.kind")),
        ("ungated", ("dtype=shares.dtype", "dtype=self.first.dtype")),
        ("ungated", ("dtype=shares.dtype", "dtype=torch.float16")),
        ("ungated", (", dtype=shares.dtype", "")),
        ("ungated", ("return total.to(rows.dtype)", "return total")),
    ],
)
def test_near_misses_of_other_variants(variant, change):
    reason_of(changed(LOOKALIKES[variant].source, change))


CANDIDATE = """
class {name}(nn.Module):
    def __init__(self, num_experts, width):
        super().__init__()
        self.bank = nn.Parameter(torch.{make})

    def forward(self, rows):
        return rows.abs()
"""


@pytest.mark.parametrize(
    ("name", "make", "counted"),
    [
        ("MyExperts", "ones(2)", True),
        ("OldNaiveMoe", "ones(2)", True),
        ("Mixture", "empty(num_experts, width, width)", True),
        ("Mixture", "empty((num_experts, width, width))", True),
        ("Mixture", "empty(num_experts, width)", False),
        ("Embeddings", "zeros(1, 1, width)", False),
        ("ExpertsLayer", "ones(2)", False),
    ],
)
def test_candidates(name, make, counted):
    sites = sites_of(moe_experts, HEAD + CANDIDATE.format(name=name, make=make))
    assert [site.target for site in sites] == [f"{name}.forward"] * counted
    assert all(site.status is Status.MISSED and site.reason for site in sites)


def test_a_candidate_without_forward_is_counted():
    site = site_of(f"{HEAD}class MoreExperts(nn.Module):\n    pass\n")
    assert (site.target, site.status, site.reason) == ("MoreExperts", Status.MISSED, "it defines no forward")


DECORATED = """
import functools

taken = []


def dispatched(cls):
    inner = cls.forward

    @functools.wraps(inner)
    def forward(self, *args, **kwargs):
        taken.append("dispatched")
        return inner(self, *args, **kwargs)

    cls.forward = forward
    return cls


@dispatched
class BankExperts"""


def test_calls_reach_the_guard_under_a_decorator():
    source = GATED.replace("\nclass BankExperts", DECORATED)
    site = site_of(source)
    lines = in_lines(spliced(source, [site])).splitlines()
    at = lines.index("@dispatched")
    operands = "(rows, chosen, shares, self.first, self.second, self.act)"
    assert (
        lines[at - 1] == f"@veomni_moe_experts_gated.reached(lambda self, rows, chosen, shares: {operands})"
    )
    scope = executed(source, [site])
    experts, inputs = scope["BankExperts"](COUNT, WIDTH, INNER), calls()
    with_kernel = experts(*inputs)
    assert scope["taken"] == []
    set_choice("eager")
    assert torch.equal(experts(*inputs), with_kernel)
    assert scope["taken"] == ["dispatched"]


def test_an_undecorated_class_gets_a_guard_only():
    assert "reached" not in spliced(GATED, [site_of(GATED)])


def test_relies_on_what_it_read():
    site = site_of(LOOKALIKES["gated_clamped"].source)
    assert set(site.relies_on) == {"BankExperts.__init__", "BankExperts.joined"}


def test_a_method_that_a_subclass_overrides_is_not_followed():
    source = LOOKALIKES["gated_clamped"].source
    source += "\n\nclass Other(BankExperts):\n    def joined(self, both):\n        return both\n"
    assert "nearest" in reason_of(source)


def test_long_operands_stand_on_lines_of_their_own():
    variant = LOOKALIKES["biased_interleaved_alpha_gated"]
    text = spliced(variant.source, [site_of(variant.source)])
    assert max(map(len, text.splitlines())) <= 110


def whole(variant):
    """A module of experts that is not a loop over one formula, and arguments for it."""
    rows, chosen, shares = calls()
    mask = torch.nn.functional.one_hot(chosen[:, :1], COUNT)
    mask[3] = 0
    return {
        "gated_or_identity": (OR_IDENTITY, [rows, chosen, shares]),
        "modules": (MODULES, [rows, mask, shares[:, :1]]),
        "batched_gated": (BATCHED, [torch.randn(COUNT * 3, WIDTH)]),
        "shared_gated": (SHARED, [torch.randn(2, 7, WIDTH), torch.rand(2, 7, COUNT)]),
        "grouped_linear": (GROUPED, [rows, [4, 0, 9, 5, 1]]),
    }[variant]


WHOLE = ["gated_or_identity", "modules", "batched_gated", "shared_gated", "grouped_linear"]


@pytest.mark.parametrize("variant", WHOLE)
def test_other_experts(variant):
    source, inputs = whole(variant)
    site = site_of(source)
    assert (site.status, site.variant) == (Status.ROUTED, variant)
    outcomes = compared(
        source, [site], "BankExperts", inputs[:1], arguments=(COUNT, WIDTH, INNER),
        call=lambda experts, rows: experts(rows, *inputs[1:]),
    )  # fmt: skip
    assert outcomes["moe_experts"].backend == "reference"


@pytest.mark.parametrize(
    ("source", "change"),
    [
        (OR_IDENTITY, ("nn.Identity()", "nn.Dropout()")),
        (OR_IDENTITY, ("number >= self.real or", "number > self.real or")),
        (OR_IDENTITY, ("number >= self.real or", "number >= self.all or")),
        (OR_IDENTITY, ("self.first is None", "self.second is None")),
        (OR_IDENTITY, ("out = self.same(state)", "out = self.same(state) * 2")),
        (OR_IDENTITY, ("if chosen.numel() == 0:", "if self.act.numel() == 0:")),
        (MODULES, ('self[f"bank_{number}"] = nn', 'self[f"bank_{number + 1}"] = nn')),
        (MODULES, ("range(count)", "reversed(range(count))")),
        (MODULES, ("        self.count = count", "        self.more = nn.Dropout()")),
        (MODULES, ("nn.ModuleDict", "nn.ModuleList")),
        (MODULES, ("(rows[row]) *", "(rows[row]) * 2 *")),
        (MODULES, ("bank_{bank[0]}", "bank_{bank[0] + 1}")),
        (MODULES, ("bank_{bank[0]}", "bank_{bank[0]:d}")),
        (BATCHED, ("up * self.act(gate)", "gate * self.act(up)")),
        (BATCHED, ("rows.view(-1, self.width)", "rows.view(self.width, -1)")),
        (SHARED, ("down.float()", "down")),
        (SHARED, ("up * shares", "up")),
        (GROUPED, ("range(self.num_banks)", "range(self.num_banks - 1)")),
        (GROUPED, ("shares[number]", "shares[0]")),
        (GROUPED, ("torch.cat(found, dim=0)", "torch.cat(found, dim=1)")),
        (GROUPED, ("self.num_banks = num_banks", "self.num_banks = 2 * num_banks")),
        (GROUPED, ("return joined", "return joined * 2")),
    ],
)
def test_near_misses_of_other_experts(source, change):
    reason_of(changed(source, change))


def test_an_instance_with_another_name():
    # The reader and the guard's text require the name self.
    source = re.sub(r"\bself\b", "this", MODULES)
    assert "first parameter is not self" in reason_of(source)


def test_identity_without_a_module():
    source = changed(OR_IDENTITY, ("self.same(state)", "state"))
    assert site_of(source).variant == "gated_or_identity"
    assert site_of(source).captures["identity"] == "None"
    assert site_of(OR_IDENTITY).captures["identity"] == "self.same"


def test_the_references_own_formulas_are_all_in_use():
    from veomni_hook.kernels.moe_experts.variants import OP

    assert set(OP.variants) == {*LOOKALIKES, *WHOLE}
