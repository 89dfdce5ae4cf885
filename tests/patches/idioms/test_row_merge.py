"""Rows that are merged, added, joined and counted: what is routed, what is missed, and what it computes."""

import textwrap

import pytest
import torch

from tests.patches.idioms.applied import changed, compared, executed, in_lines, sites_of, spliced
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.idioms import count_check as counts
from veomni_hook.patches.idioms.row_merge import added, find, joined
from veomni_hook.patches.site import Status

HEAD = """
import torch
from torch import nn
from transformers.utils import torch_compilable_check

class Model(nn.Module):
    def {head}:
"""
CALL = "veomni_row_merge_rows.call(self, torch.Tensor.masked_scatter, {operands})"


@pytest.fixture(autouse=True)
def _by_name():
    set_choice("row_merge=torch")


def module(body, head="forward(self, x, mask, s)"):
    return HEAD.format(head=head) + textwrap.indent(textwrap.dedent(body).strip("\n"), "        ") + "\n"


def site_of(text, idiom):
    (site,) = sites_of(idiom, text, "transformers.models.a.modeling_a")
    return site


def outcome_of(text, site, mask, *operands):
    def call(model, x, s):
        return model(x, mask, s)

    return compared(text, [site], "Model", operands, call=call, cast=False)["row_merge"]


X, S = torch.randn(2, 5, 6), torch.randn(6, 6)
MASK = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 1]]).bool()

#: The body of forward(self, x, mask, s), and the operands of the slot.
CALLS: dict[str, tuple[str, str]] = {
    "a statement": ("x = x.masked_scatter(mask, s)\nreturn x", "x, mask, s"),
    "operands that are computed": (
        "return x.to(s.device).masked_scatter(mask.to(x.device), s.to(x.device, x.dtype))",
        "x.to(s.device), mask.to(x.device), s.to(x.device, x.dtype)",
    ),
    "on several lines": ("return (\n    x.masked_scatter(\n        mask,  # where\n        s,\n    ) * 2\n)", "x, mask, s"),
    "one after another": ("x = x.masked_scatter(mask, s)\nreturn x.masked_scatter(~mask, s.repeat(2, 1))", "x, ~mask, s.repeat(2, 1)"),
    "one in another": (
        "return x.masked_scatter(mask, s.masked_scatter(mask[0, :1], s * 2))",
        "x, mask, veomni_row_merge_rows.call(self, torch.Tensor.masked_scatter, s, mask[0, :1], s * 2)",
    ),
    "a long line": (
        "a_name_of_some_length = x.masked_scatter(mask.to(x.device), s.to(device=x.device, dtype=x.dtype))\n"
        "return a_name_of_some_length",
        "x, mask.to(x.device), s.to(device=x.device, dtype=x.dtype)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_routed_and_compute_the_same(name):
    body, operands = CALLS[name]
    text = module(body)
    site = site_of(text, find)
    assert (site.op, site.part, site.variant, site.target) == ("row_merge", "merge", "rows", "Model.forward")
    assert site.status is Status.ROUTED and not site.reason
    patched = spliced(text, [site])
    assert CALL.format(operands=operands) in in_lines(patched)
    assert max(map(len, patched.splitlines())) <= 120
    assert outcome_of(text, site, MASK.unsqueeze(-1), X, S) == ("torch", "chosen")
    if "~" not in body and name != "one in another":  # these need a mask of their own
        assert outcome_of(text, site, MASK.unsqueeze(-1).expand_as(X), X, S) == ("torch", "chosen")


def test_a_mask_of_elements_runs_as_it_is():
    text = module("return x.masked_scatter(mask, s)")
    backend, reason = outcome_of(text, site_of(text, find), torch.rand(2, 5, 6) < 0.5, X, torch.randn(6, 10))
    assert backend == "eager" and "not of whole rows" in reason


MISSED = {
    "in place": ("x = x.clone()\nx.masked_scatter_(mask, s)\nreturn x", "masked_scatter_ changes a tensor in place"),
    "keywords": ("return x.masked_scatter(mask=mask, source=s)", "not called with a mask and a source"),
    "a chain": ("return x.masked_scatter(mask, s).masked_scatter(mask, s)", "it is called on the result of another masked_scatter"),
    "brackets": ("return (x * 2).masked_scatter(mask, s)", "in brackets"),
    "another self": ("self, y = s, x\nreturn y.masked_scatter(mask, s)", "self is not the method's module"),
    "another torch": ("torch = s\nreturn x.masked_scatter(mask, torch)", "torch has another name here"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_calls_that_are_missed(name):
    body, reason = MISSED[name]
    site = site_of(module(body), find)
    assert reason in site.reason and f"line {site.lineno}" in site.reason
    # Of a chain, the inner call is routed.
    assert (site.status is Status.ROUTED and len(site.edits) == 1) if name == "a chain" else not site.edits


def test_methods_without_self_and_functions_are_missed():
    text = module("return x.masked_scatter(mask, s)", "merged(x, mask, s)")
    assert "self is not the method's module" in site_of(text, find).reason
    function = "import torch\n\ndef merged(x, mask, s):\n    return x.masked_scatter(mask, s)\n"
    site = site_of(function, find)
    assert (site.target, site.status) == ("merged", Status.MISSED) and "belongs to no module" in site.reason
    unnamed = module("return x.masked_scatter(mask, s)").replace("import torch\n", "import torch as t\n")
    assert "torch has another name here" in site_of(unnamed, find).reason


DEEPSTACK = """
mask = mask.to(x.device)
s = s.to(x.device, x.dtype)
x = x.clone()
local_this = x[mask, :] + s
x[mask, :] = local_this
return x
"""
#: Other ways to write it.
ADDED = {
    "as models do": DEEPSTACK,
    "in one statement": DEEPSTACK.replace(
        "local_this = x[mask, :] + s\nx[mask, :] = local_this", "x[mask, :] = x[mask, :] + s"
    ),
    "another name": DEEPSTACK.replace("local_this", "total"),
    "cloned first": "y = x.clone()\nat_mask = mask.to(x.device)\ny[at_mask, :] = y[at_mask, :] + s.to(x.device, x.dtype)\nreturn y",
}


@pytest.mark.parametrize("name", ADDED)
def test_added_rows_are_routed_and_compute_the_same(name):
    text = module(ADDED[name])
    site = site_of(text, added)
    assert (site.op, site.part, site.variant) == ("row_merge", "addition", "rows_added"), site.reason
    assert site.status is Status.ROUTED
    for source in (S[:4], S[:4].bfloat16()):
        assert outcome_of(text, site, MASK, X, source) == ("torch", "chosen")
    assert outcome_of(text, site, MASK, X, S[:1])[0] == "eager"


MISSED_ADDITIONS = {
    "in place of the caller's tensor": DEEPSTACK.replace("x = x.clone()\n", ""),
    "a product": DEEPSTACK.replace("+ s", "+ s * 2"),
    "a difference in the casts": DEEPSTACK.replace("s = s.to(x.device, x.dtype)\n", ""),
    "an addition in place": "x = x.clone()\nx[mask] += s\nreturn x",
    "something before": "x = x * 2\n" + DEEPSTACK,
}


@pytest.mark.parametrize("name", MISSED_ADDITIONS)
def test_additions_that_are_missed(name):
    site = site_of(module(MISSED_ADDITIONS[name]), added)
    assert site.status is Status.MISSED and site.reason.startswith("the method does not only add rows: ")
    assert not site.edits


def test_additions_in_functions_are_missed():
    text = "import torch\n\ndef add(x, mask, s):\n" + textwrap.indent(DEEPSTACK.strip(), "    ")
    assert "belongs to no module" in site_of(text, added).reason


def test_additions_with_a_name_for_the_rows_are_candidates():
    text = DEEPSTACK.replace("local_this = x[mask, :] + s", "rows = x[mask, :]\nlocal_this = rows + s")
    assert site_of(module(text), added).lineno


@pytest.mark.parametrize("size", ["mask.sum(), 6", "mask.sum(), 6).to(x.device"])
def test_joins_of_another_form_are_missed(size):
    body = f"joint = x.new_zeros({size})\njoint[mask[mask], :] = s\nreturn joint"
    site = site_of(module(body), joined)
    assert site.status is Status.MISSED and "read from the device (line 8)" in site.reason
    assert site_of(module("count = mask.sum()\n" + body.replace("mask.sum()", "count")), joined).lineno == 9
    others = [body.replace("mask.sum()", "len(s)"), "return x.new_zeros(mask.sum(), 6)"]
    assert not [site for each in others for site in sites_of(joined, module(each))]


JOIN = """
other = ~mask & (x[..., 0] > 0)
visual = mask | other
kept = {start}
mask_joint = mask[visual]
other_joint = other[visual]
for a, b in zip(s, t):
{whole}    joint = a.new_zeros({size})
    joint[mask_joint, :] = a
    joint[other_joint, :] = b
    {keep}
return kept
"""
#: Forms of a join, as parts of the text above.
JOINS = {
    "a list": ("[]", "visual.sum(), a.shape[-1]", "kept.append(joint)", ""),
    "a tuple": ("()", "visual.sum(), a.shape[-1]).to(a.device", "kept = kept + (joint,)", ""),
    "parts": (
        "[]", "visual.sum(), a.shape[-1]", "kept.append(joint)",
        "    a = torch.cat(a, dim=0)\n    b = torch.cat(b, dim=0)\n",
    ),
}  # fmt: skip
NEAR_JOINS = {
    "other masks": ("other_joint, :] = b", "mask_joint, :] = b"),
    "swapped": ("mask_joint, :] = a", "mask_joint, :] = b"),
    "another size": ("visual.sum(), a.shape[-1]", "mask.sum(), a.shape[-1]"),
    "more": ("joint[other_joint, :] = b", "joint[other_joint, :] = b; print(joint)"),
    "columns": ("joint[mask_joint, :] = a", "joint[:, mask_joint] = a"),
}


def join(form):
    start, size, keep, whole = JOINS[form]
    text = JOIN.format(start=start, size=size, keep=keep, whole=whole)
    return module(text, "forward(self, x, mask, s, t)")


@pytest.mark.parametrize("form", JOINS)
def test_joins_give_the_same_rows(form, monkeypatch):
    from veomni_hook.multimodal import rows

    source = join(form)
    site = site_of(source, joined)
    assert (site.status, site.variant) == (Status.ROUTED, "in_order_of_tokens")
    monkeypatch.setattr(rows, "asserts", lambda value: True)
    ours, theirs = (executed(source, sites)["Model"]() for sites in ([site], []))
    torch.manual_seed(0)
    x, mask = torch.randn(2, 9, 6), torch.rand(2, 9) > 0.6
    count, others = int(mask.sum()), int((~mask & (x[..., 0] > 0)).sum())
    features = [torch.randn(2, each, 6).requires_grad_() for each in (count, others)]
    first, second = (list(each) for each in features)
    if form == "parts":
        first, second = ([each.split([1, len(each) - 1]) for each in kind] for kind in (first, second))
    found, truth = (each.forward(x, mask, first, second) for each in (ours, theirs))
    assert type(found) is type(truth) and len(found) == len(truth) == 2
    for one, other in zip(found, truth, strict=True):
        assert torch.equal(one, other)
    weights = torch.randn(count + others, 6)
    grads = [
        torch.autograd.grad(sum((each * weights).sum() for each in one), features) for one in (found, truth)
    ]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("miss", NEAR_JOINS)
def test_joins_that_only_look_alike_are_missed(miss):
    old, new = NEAR_JOINS[miss]
    assert site_of(changed(join("a list"), (old, new)), joined).status is Status.MISSED


CHECK = """
n = mask.sum()
torch_compilable_check(
    {condition},
    {message},
)
return mask
"""
EQUAL = "x[mask].numel() == s.numel()"
SAID = 'f"Features and tokens do not match, tokens: {n}, features: {s.shape[0]}"'


def check(condition=EQUAL, message=SAID):
    return module(
        CHECK.format(condition=condition, message=message), "get_placeholder_mask(self, x, mask, s)"
    )


#: Conditions and messages, and what they become.
CHECKS: dict[str, tuple[str, str, str, str]] = {
    "elements at a mask": (EQUAL, SAID, "veomni_counts.selected(x, mask) == s.numel()", "lambda n=n: "),
    "a product": ("n * x.shape[-1] == s.numel()", SAID, "n * x.shape[-1] == s.numel()", "lambda n=n: "),
    "two names": ("n == len_", 'f"tokens: {n}, features {len_} {n}"', "n == len_", "lambda n=n, len_=len_: "),
    "sizes": (
        EQUAL, 'f"tokens and features {s.size()[:-1].numel()} {s.shape[0] * s.shape[1]}"',
        "veomni_counts.selected(x, mask) == s.numel()", "lambda: ",
    ),
    "two strings": (EQUAL, 'f"tokens {n}"\n    f" features {s.shape[0]}"', "veomni_counts.selected(x, mask) == s.numel()", "lambda n=n: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_checks_are_routed_and_say_the_same(name):
    condition, message, said, head = CHECKS[name]
    text = check(condition, message).replace("n = mask.sum()", "n = mask.sum()\n        len_ = len(s)")
    site = site_of(text, counts)
    assert (site.op, site.variant) == ("count_check", "asserted_on_device"), site.reason
    assert site.status is Status.ROUTED and not site.slots
    patched = spliced(text, [site])
    # The message keeps its text and its line.
    assert message.partition("\n")[0] in patched
    assert f"veomni_counts.check(torch_compilable_check, {said}, {head}f" in in_lines(patched)
    mask = MASK.unsqueeze(-1).expand_as(X) if "x[" in condition else MASK
    right = torch.randn(int(mask.sum()) // (6 if "x[" in condition else 1), 6)
    outcomes = []
    for routed in ([], [site]):
        call = executed(text, routed)["Model"]().get_placeholder_mask
        assert call(X, mask, right) is mask
        with pytest.raises(ValueError, match="tokens") as caught:
            call(X, mask, right[1:])
        outcomes.append(str(caught.value))
    assert outcomes[0] == outcomes[1]


MISSED_CHECKS: dict[str, tuple[str, str, str]] = {
    "a function": (EQUAL, f"lambda: {SAID}", "the message is not an f-string"),
    "no number": (EQUAL, '"tokens and features"', "the message is not an f-string"),
    "a value that is read": (EQUAL, 'f"tokens {n.item()} features"', "may read n.item() from the device"),
    "a format": (EQUAL, 'f"tokens {n:d} features"', "formats a value in its own way"),
    "a name and its size": (EQUAL, 'f"tokens {s} features {s.shape[0]}"', "shows s and a size of it"),
    "another comparison": ("n <= s.shape[0]", SAID, "not that two numbers are equal"),
    "a call": ("n == len(s)", SAID, "len(s) is neither a number nor a size"),
    "brackets": ("(n == s.shape[0])", SAID, "in brackets"),
    "more arguments": (EQUAL, f"{SAID}, RuntimeError", "other arguments than a condition and a message"),
}


@pytest.mark.parametrize("name", MISSED_CHECKS)
def test_checks_that_are_missed(name):
    condition, message, reason = MISSED_CHECKS[name]
    site = site_of(check(condition, message), counts)
    assert site.status is Status.MISSED and reason in site.reason and not site.edits


def test_checks_of_another_kind():
    raising = "if mask.sum() != len(s):\n    raise ValueError('no')\nreturn mask"
    site = site_of(module(raising, "get_placeholder_mask(self, x, mask, s)"), counts)
    assert site.status is Status.MISSED and site.reason == "it raises an error itself"
    own = check().replace(
        "from transformers.utils import torch_compilable_check", "def torch_compilable_check(*_): pass"
    )
    assert "not transformers' own" in site_of(own, counts).reason
    others = [check(message='"All examples must have tokens"'), module(raising)]
    assert not [site for each in others for site in sites_of(counts, each)]
