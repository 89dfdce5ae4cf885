import ast
import functools
import textwrap
from functools import partial
from importlib.resources import files

import pytest
import torch

from tests.patches.idioms.applied import changed, sites_of
from veomni_hook.kernels.rotary import reference
from veomni_hook.kernels.rotary.variants import OP as DECLARED
from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.slot.arguments import binder, operand_names
from veomni_hook.patches.graph import reference_names
from veomni_hook.patches.idioms import rotary
from veomni_hook.patches.site import Status

HALVES = """
def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
"""
NEIGHBOURS = """
def rotate_half(x):
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([-second, first], dim=-1).flatten(-2)
"""
BACKWARDS = HALVES.replace("(-x[..., half:], x[..., :half])", "(x[..., half:], -x[..., :half])")
APPLY = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
ATTENTION = """
class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k
"""
HEAD = "import torch\nfrom torch import nn\n"
MODULE = HEAD + HALVES + APPLY + ATTENTION


sites = partial(sites_of, rotary)


def candidates(text):
    return [site for site in sites(text) if site.counted]


def only(text):
    (site,) = candidates(text)
    return site


def calls(text):
    return [site for site in sites(text) if not site.counted]


def parameters(text):
    (slot,) = {slot for site in sites(text) for slot in site.slots}
    return slot.parameters


@pytest.fixture
def chosen(monkeypatch):
    """Use the reference kernels; yield the requests as (variant, operands)."""
    taken = []

    def recording(name, function):
        @functools.wraps(function)
        def run(*operands):
            taken.append((name, operands))
            return function(*operands)

        return run

    for name in DECLARED.variants:
        monkeypatch.setattr(reference, name, recording(name, getattr(reference, name)))
    set_choice("rotary=reference")
    return taken


# Recognition


def test_a_function_and_its_call():
    function, call = sites(MODULE)
    assert (function.target, function.status, function.variant) == (
        "apply_rotary_pos_emb",
        Status.ROUTED,
        "half_split",
    )
    assert function.counted and function.reason == "" and not function.edits and function.form
    assert (call.target, call.status, call.counted) == ("Attention.forward", Status.ROUTED, False)
    (edit,) = call.edits
    assert MODULE[edit.start : edit.end] == "apply_rotary_pos_emb"
    assert edit.text == "veomni_rotary_half_split.at(self, apply_rotary_pos_emb)"
    (slot,) = call.slots
    assert (slot.name, slot.op, slot.variant) == ("veomni_rotary_half_split", "rotary", "half_split")
    assert slot.parameters == "q, k, cos, sin, unsqueeze_dim=1"
    assert call.relies_on == ("apply_rotary_pos_emb",)


@pytest.mark.parametrize(
    ("helper", "variant"), [(HALVES, "half_split"), (NEIGHBOURS, "pairs"), (BACKWARDS, "half_split_reversed")]
)
def test_one_text_with_another_helper_is_another_formula(helper, variant):
    assert only(HEAD + helper + APPLY + ATTENTION).variant == variant


@pytest.mark.parametrize(
    ("old", "new", "variant"),
    [
        # The same in other words.
        ("(q * cos) + (rotate_half(q) * sin)", "torch.add(sin * rotate_half(q), torch.mul(cos, q))", "half_split"),
        ("cos.unsqueeze(unsqueeze_dim)", "torch.unsqueeze(cos, dim=unsqueeze_dim)", "half_split"),
        ("q_embed, k_embed", "tuple([q_embed, k_embed])", "half_split"),
        # Casts.
        ("return q_embed, k_embed", "return q_embed.to(q.dtype), k_embed.type_as(k)", "half_split_cast_out"),
        ("return q_embed, k_embed", "return q_embed.to(q.dtype), k_embed.to(q.dtype)", ""),
        ("return q_embed, k_embed", "return q_embed.to(k.dtype), k_embed.to(q.dtype)", ""),
        ("return q_embed, k_embed", "return q_embed.to(q.dtype), k_embed", ""),
        ("return q_embed, k_embed", "return q_embed.half(), k_embed.half()", ""),
        ("(q * cos)", "(q.float() * cos)", ""),
        ("cos = cos.unsqueeze(unsqueeze_dim)", "cos = cos.float().unsqueeze(unsqueeze_dim)", ""),
        # Signs, operands, operators.
        ("(q * cos) +", "(q * cos) -", ""),
        ("(rotate_half(k) * sin)", "(rotate_half(k) * cos)", ""),
        ("(rotate_half(k) * sin)", "(rotate_half(q) * sin)", ""),
        ("(rotate_half(k) * sin)", "(k * sin)", ""),
        ("return q_embed, k_embed", "return k_embed, q_embed", "half_split"),
        ("return q_embed, k_embed", "return q_embed", "half_split_single"),
        ("return q_embed, k_embed", "return q_embed, k", ""),
        ("sin = sin.unsqueeze(unsqueeze_dim)", "sin = sin.unsqueeze(1)", ""),
        ("    cos = cos", "    unsqueeze_dim = unsqueeze_dim + 1\n    cos = cos", ""),
        ("    cos = cos", "    unsqueeze_dim = AXIS\n    cos = cos", ""),
        ("    cos = cos", "    unsqueeze_dim = True\n    cos = cos", ""),
        ("sin = sin.unsqueeze(unsqueeze_dim)", "sin = cos.unsqueeze(unsqueeze_dim)", ""),
        ("x.shape[-1] // 2", "x.shape[-1] // 3", ""),
        ("dim=-1)", "dim=-2)", ""),
        ("-x[..., half:]", "x[..., half:]", ""),
        # More than a formula.
        ("    q_embed =", "    q.mul_(2)\n    q_embed =", ""),
        ("    q_embed =", "    note(q)\n    q_embed =", ""),
        ("    return q_embed", "    if q.shape[1] > 4:\n        return q, k\n    return q_embed", ""),
    ],
)  # fmt: skip
def test_near_forms(old, new, variant):
    site = only(changed(MODULE, (old, new)))
    assert site.variant == variant
    assert site.status is (Status.ROUTED if variant else Status.MISSED)
    assert bool(site.reason) is not bool(variant)
    if not variant:
        assert not calls(MODULE.replace(old, new))


def test_float32_forms():
    fp32 = APPLY.replace("    cos =", "    dtype = q.dtype\n    q, k = q.float(), k.float()\n    cos =")
    own = fp32.replace("dtype = q.dtype", "of_q, of_k = q.dtype, k.dtype").replace(
        "return q_embed, k_embed", "return q_embed.to(of_q), k_embed.to(of_k)"
    )
    as_query = fp32.replace("return q_embed, k_embed", "return q_embed.to(dtype), k_embed.to(dtype=dtype)")
    tables = own.replace("(unsqueeze_dim)", "(-2).float()").replace(", unsqueeze_dim=1", "")
    found = {name: only(HEAD + helper + text + ATTENTION) for name, helper, text in (
        ("query", HALVES, as_query), ("pairs", NEIGHBOURS, as_query), ("tables", HALVES, tables), ("own", HALVES, own)
    )}  # fmt: skip
    assert found["query"].variant == "half_split_fp32_as_query"
    assert found["pairs"].variant == "pairs_fp32_as_query"
    assert found["tables"].variant == "half_split_fp32"
    assert found["tables"].captures == {"unsqueeze_dim": "-2"}
    # Operands of float32 are promoted, with or without an explicit cast.
    assert found["own"].variant == "half_split_fp32"


PARTIAL = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    q_part, q_rest = q[..., :width], q[..., width:]
    k_part, k_rest = k[..., :width], k[..., width:]
    q_part = q_part * cos + rotate_half(q_part) * sin
    k_part = k_part * cos + rotate_half(k_part) * sin
    return torch.cat([q_part, q_rest], dim=-1), torch.cat([k_part, k_rest], dim=-1)
"""


@pytest.mark.parametrize(
    ("helper", "old", "new", "variant"),
    [
        (HALVES, "", "", "half_split_partial"),
        (NEIGHBOURS, "", "", "pairs_partial"),
        (HALVES, "[q_part, q_rest]", "[q_rest, q_part]", ""),
        (HALVES, "q[..., width:]", "q[..., :width]", ""),
        (HALVES, "width = cos.shape[-1]", "width = cos.shape[-2]", ""),
        (HALVES, "rotate_half(q_part)", "rotate_half(q)[..., :width]", ""),
    ],
)
def test_partial_forms(helper, old, new, variant):
    assert only(HEAD + helper + PARTIAL.replace(old, new) + ATTENTION).variant == variant


def test_what_a_miss_says():
    site = only(MODULE.replace("(q * cos) +", "(q * cos) -"))
    assert site.reason.startswith("nearest is half_split") and "line" in site.reason and site.lineno


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("def apply_", "@torch.no_grad()\ndef apply_"), "decorated with torch.no_grad()"),
        (lambda text: text + "\napply_rotary_pos_emb = wrapped(apply_rotary_pos_emb)\n", "not the only"),
        (lambda text: text.replace("def apply_", "if True:\n  def apply_"), "not the only"),
        (lambda text: text.replace("def apply_", "async def apply_"), "async"),
        (lambda text: text.replace("unsqueeze_dim=1", "unsqueeze_dim=FIRST"), "parameters"),
        (lambda text: text.replace("(q, k, cos, sin, unsqueeze_dim=1)", "(x, q, k, cos, sin)").replace("(unsqueeze_dim)", "(x)"), ""),
    ],
)  # fmt: skip
def test_functions_that_are_not_looked_at(change, reason):
    site = only(change(MODULE))
    assert reason in site.reason
    assert site.status is (Status.MISSED if reason else Status.ROUTED)


@pytest.mark.parametrize(
    "decorator", ['use_kernel_forward_from_hub("rotary.v2")', 'hub.use_kernel_func_from_hub("x")']
)
def test_hub_decorators_do_not_matter(decorator):
    text = MODULE.replace("def apply_", f"@{decorator}\ndef apply_").replace(
        "class Attention", "@use_kernelized_func(apply_rotary_pos_emb)\nclass Attention"
    )
    assert [site.status for site in sites(text)] == [Status.ROUTED] * 2


# Parameters and slots


@pytest.mark.parametrize(
    ("signature", "body", "told"),
    [
        ("q, k, cos, sin, position_ids=None, unsqueeze_dim=1", "", "q, k, cos, sin, position_ids=None, unsqueeze_dim=1"),
        ("query, key, c, s, at=1", "q, k, cos, sin, unsqueeze_dim = query, key, c, s, at", "query->q, key->k, c->cos, s->sin, at->unsqueeze_dim=1"),
        ("q, k, cos, sin, **kwargs", "unsqueeze_dim = 1", "q, k, cos, sin, *, unsqueeze_dim=1, **kwargs"),
        ("q, k, cos, sin, *rest", "unsqueeze_dim = 2", "q, k, cos, sin, *rest, unsqueeze_dim=2"),
        ("q, k, /, cos, *, sin, unsqueeze_dim=1", "", "q, k, /, cos, *, sin, unsqueeze_dim=1"),
        ("q, k, *, cos, sin", "unsqueeze_dim = -2", "q, k, *, cos, sin, unsqueeze_dim=-2"),
        ("sin, cos, k, q, unsqueeze_dim", "", "sin, cos, k, q, unsqueeze_dim"),
        ("query, q, cos, sin, unsqueeze_dim=1", "q, k = query, q", "query->q, q->k, cos, sin, unsqueeze_dim=1"),
    ],
)  # fmt: skip
def test_parameters(signature, body, told):
    text = MODULE.replace("(q, k, cos, sin, unsqueeze_dim=1):", f"({signature}):\n    {body or 'pass'}")
    text = text.replace("apply_rotary_pos_emb(q, k, cos, sin)", "apply_rotary_pos_emb(1, 2)")
    assert parameters(text) == told
    assert binder(told, operand_names("rotary", "half_split"))  # it is understood


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("q, cos, sin, k=None, unsqueeze_dim=1", "k = q"),
        ("query, k, q, cos, sin, unsqueeze_dim=1", "q = query"),
        ("q, k, cos, unsqueeze_dim=1", "sin = cos"),
    ],
)
def test_parameters_that_do_not_tell_the_operands(signature, body):
    text = MODULE.replace("(q, k, cos, sin, unsqueeze_dim=1):", f"({signature}):\n    {body}")
    site = only(text)
    assert site.status is Status.MISSED and "parameters" in site.reason


def test_two_functions_of_one_formula():
    second = APPLY.replace("apply_rotary_pos_emb", "apply_rotary_vision").replace(
        ", unsqueeze_dim=1", ", position_ids, unsqueeze_dim=1"
    )
    third = APPLY.replace("apply_rotary_pos_emb", "apply_rotary_again")
    more = ATTENTION.replace("Attention", "Vision").replace("apply_rotary_pos_emb(", "apply_rotary_vision(")
    text = HEAD + HALVES + APPLY + second + third + ATTENTION + more
    text += more.replace("Vision", "Again").replace("vision", "again")
    slots = {site.target: site.slots[0] for site in sites(text) if site.slots}
    assert slots["Attention.forward"] == slots["Again.forward"] != slots["Vision.forward"]
    assert slots["Vision.forward"].name == "veomni_rotary_half_split_apply_rotary_vision"
    assert "position_ids" in slots["Vision.forward"].parameters


# Call sites


def test_calls_without_a_module_are_rows_of_their_own():
    text = MODULE + "\n\ndef helper(q, k, cos, sin):\n    return apply_rotary_pos_emb(q, k, cos, sin)\n"
    bound, unbound = calls(text)
    assert bound.status is Status.ROUTED and only(text).status is Status.ROUTED
    assert (unbound.target, unbound.status) == ("helper", Status.UNBOUND)
    assert "no module" in unbound.reason and not unbound.edits and not unbound.slots


def test_a_function_that_only_functions_call():
    text = HEAD + HALVES + APPLY + "\n\ndef helper(*given):\n    return apply_rotary_pos_emb(*given)\n"
    site = only(text)
    assert site.status is Status.UNBOUND and "no module" in site.reason


def test_a_part_of_another_rotary_function():
    part = "def _apply_rope(x, cos, sin):\n    a, b = x.chunk(2, -1)\n    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)\n"
    whole = """
def apply_rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _apply_rope(q, cos, sin), _apply_rope(k, cos, sin)
"""
    text = HEAD + part + whole + ATTENTION.replace("apply_rotary_pos_emb", "apply_rope")
    found = {site.target: site for site in candidates(text)}
    assert found["_apply_rope"].variant == "half_width_halves_single"
    assert found["apply_rope"].variant == "half_width_halves"
    assert "nothing calls it but apply_rope" in found["_apply_rope"].reason
    assert {site.status for site in found.values()} == {Status.ROUTED}
    assert [site.status for site in calls(text)] == [Status.UNBOUND] * 2 + [Status.ROUTED]


def test_a_function_that_nothing_calls():
    site = only(HEAD + HALVES + APPLY)
    assert site.status is Status.ROUTED and site.reason == "nothing calls it" and not site.slots


def test_a_leak_is_told():
    text = MODULE + "\nTABLE = {'default': apply_rotary_pos_emb}\n"
    site = only(text)
    assert site.status is Status.UNBOUND and "passed on" in site.reason and "line" in site.reason
    assert [call.status for call in calls(text)] == [Status.ROUTED, Status.UNBOUND]


def test_a_function_of_another_file():
    text = HEAD + "from ..other.modeling_other import apply_rotary_pos_emb\n" + ATTENTION
    (site,) = sites(text)
    assert site.status is Status.UNBOUND and not site.counted and "..other.modeling_other" in site.reason


@pytest.mark.parametrize("text", ["", "x = 1", HALVES, "def apply(q):\n    return q"])
def test_other_modules_have_none(text):
    assert sites(text) == []


# Methods


METHOD = '''
class Attention(nn.Module):
    def forward(self, freqs):
        return self.apply_mrope(freqs, self.sections)

    def apply_mrope(this, table, widths):
        """Sections in turn."""
        chunks = table.split(widths, dim=-1)
        kernel = torch.cat([chunk[i % 3] for i, chunk in enumerate(chunks)], dim=-1)
        return kernel
'''


def test_a_method_asks_in_front_of_its_body():
    site = only(HEAD + METHOD)
    assert (site.target, site.variant) == ("Attention.apply_mrope", "sections")
    text = "".join(edit.text for edit in site.edits)
    assert "operands = (table, widths)\n" in text
    assert "if (veomni_kernel := veomni_rotary_sections.kernel(this, *operands)) is not None:" in text
    assert "return veomni_kernel(*operands)" in text
    assert site.slots[0].parameters == ""


@pytest.mark.parametrize("decorator", ["staticmethod", "classmethod", "torch.no_grad()"])
def test_decorated_methods_are_missed(decorator):
    text = HEAD + METHOD.replace("    def apply_mrope", f"    @{decorator}\n    def apply_mrope")
    assert only(text).status is Status.MISSED and decorator in only(text).reason


# References are patterns


def test_every_reference_is_found_by_its_own_text():
    tree = ast.parse(files("veomni_hook").joinpath("kernels/rotary/reference.py").read_text())
    text = ast.unparse(tree)
    for name in reference_names("kernels/rotary/reference.py"):
        renamed = text.replace(f"def {name}(", "def apply_rotary_pos_emb(")
        site = next(site for site in candidates(renamed) if site.target == "apply_rotary_pos_emb")
        assert site.variant == name.partition("__")[0]
    names = reference_names("kernels/rotary/reference.py")
    assert {name.partition("__")[0] for name in names} == {*DECLARED.variants}


# End to end


def operands():
    torch.manual_seed(0)
    return [torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), *torch.randn(2, 2, 5, 8)]


@pytest.mark.parametrize(
    "call",
    [
        "apply_rotary_pos_emb(q, k, cos, sin)",
        "apply_rotary_pos_emb(q=q, k=k, sin=sin, cos=cos)",
        "apply_rotary_pos_emb(q, k, *(cos, sin), **{'unsqueeze_dim': 1})",
        "apply_rotary_pos_emb(\n            q * 1, k=(k),  # why\n            cos=cos, sin=sin,\n        )",
        "(apply_rotary_pos_emb if True else other)(q, k, cos, sin, 1)",
        "functools.partial(apply_rotary_pos_emb, q, k)(cos=cos, sin=sin)",
        "self.rotate(q, k, cos, sin)",
        "[apply_rotary_pos_emb(q, k, cos, sin) for _ in range(1)][0]",
    ],
)
def test_patched_calls_reach_the_kernel(call, chosen, patched, run, idioms):
    idioms(rotary.find)
    text = "import functools\n" + MODULE.replace("apply_rotary_pos_emb(q, k, cos, sin)", call)
    init = (
        "    def __init__(self):\n        super().__init__()\n        self.rotate = apply_rotary_pos_emb\n\n"
    )
    text = text.replace("    def forward", init + "    def forward") if "self.rotate" in call else text
    result = patched(text, idioms=True)
    upstream, module = run(patched(text)), run(result)
    want = upstream["Attention"]()(*operands())
    found = module["Attention"]()(*operands())
    ((variant, given),) = chosen
    assert variant == "half_split" and given[-1] == 1 and len(given) == 5
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_another_function_in_the_attribute_is_upstreams_business(chosen, patched, run, idioms):
    idioms(rotary.find)
    text = MODULE.replace(
        "    def forward",
        "    def __init__(self):\n        super().__init__()\n        self.rotate = apply_rotary_pos_emb\n\n    def forward",
    ).replace("apply_rotary_pos_emb(q, k, cos, sin)", "self.rotate(q, k, cos, sin)")
    text += "\n\ndef other(q, k, cos, sin):\n    return 1, 2\n"
    module = run(patched(text, idioms=True))
    attention = module["Attention"]()
    attention.rotate = module["other"]
    assert attention(*operands()) == (1, 2) and chosen == []


def test_patched_method_reaches_the_kernel(chosen, patched, run, idioms):
    idioms(rotary.find)
    attention = run(patched(HEAD + METHOD, idioms=True))["Attention"]()
    attention.sections = [1, 2, 1]
    table = torch.randn(3, 2, 5, 4)
    turned = attention(table)
    assert [name for name, _ in chosen] == ["sections"]
    assert torch.equal(turned, torch.stack([table[i, ..., j] for j, i in enumerate([0, 1, 1, 2])], -1))


def test_a_shadowed_name_is_left_alone(patched, idioms):
    idioms(rotary.find)
    text = MODULE.replace(
        "forward(self, q, k, cos, sin)", "forward(self, q, k, cos, sin, apply_rotary_pos_emb)"
    )
    result = patched(text, idioms=True)
    assert not result.report.applied and only(text).reason == "nothing calls it"


def test_no_kernel_costs_no_wrapper(chosen, patched, run, idioms):
    idioms(rotary.find)
    set_choice("eager")
    module = run(patched(HEAD + NEIGHBOURS + APPLY + ATTENTION, idioms=True))
    upstream = module["apply_rotary_pos_emb"]
    assert module["veomni_rotary_pairs"].at(module["Attention"](), upstream) is upstream


def test_results_in_another_order(chosen, patched, run, idioms):
    idioms(rotary.find)
    text = MODULE.replace("return q_embed, k_embed", "return k_embed, q_embed")
    assert parameters(text) == "q->k, k->q, cos, sin, unsqueeze_dim=1"
    want = run(patched(text))["Attention"]()(*operands())
    found = run(patched(text, idioms=True))["Attention"]()(*operands())
    assert chosen and all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_wrong_arguments_fail_as_upstream(chosen, patched, run, idioms):
    idioms(rotary.find)
    text = MODULE.replace("apply_rotary_pos_emb(q, k, cos, sin)", "apply_rotary_pos_emb(q, k, cos)")
    with pytest.raises(TypeError, match="apply_rotary_pos_emb"):
        run(patched(text, idioms=True))["Attention"]()(*operands())
    assert chosen == []


def test_declared_kernels_have_variants_that_are_recognised():
    for kernel in registry.kernels("rotary"):
        assert isinstance(kernel, Kernel) and kernel.variant in DECLARED.variants
    assert textwrap.dedent(rotary.CANDIDATES)


@pytest.mark.parametrize(
    ("signature", "status"), [("this, /, table, widths", Status.ROUTED), ("", Status.MISSED)]
)
def test_the_instance_of_a_method(signature, status):
    text = HEAD + METHOD.replace("this, table, widths", signature)
    assert only(text).status is status
