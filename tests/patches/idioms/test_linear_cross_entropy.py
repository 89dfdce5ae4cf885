import textwrap

import pytest
import torch

from tests.kernels.matching import close
from tests.patches.idioms.applied import executed, sites_of
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.idioms.linear_cross_entropy import find as idiom
from veomni_hook.patches.site import Site, SlotSpec, Status

SLOT = "veomni_linear_cross_entropy_next_token"

MODULE = '''
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeCausalLMOutputWithPast as Output

class Decoder(nn.Module):
    """A head around its Linear."""

    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, hidden):
        return self.out(F.gelu(self.dense(hidden)))

class Cap(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        return torch.tanh(x / self.most) * self.most

class Bent(Cap):
    def forward(self, x):
        return torch.tanh(x / self.most) * self.most * 2

def balance(router, weight):
    return router.pow(2).mean() * weight

def squash(x):
    return x.sigmoid()

class Tiny(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.lm_head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.cap = Cap(2.0)
        self.bent = Bent(2.0)
        self.heads, self.cls = nn.ModuleList([nn.Linear(8, 11), nn.Linear(8, 11)]), Decoder()
        self.config = SimpleNamespace(vocab_size=11, cap=2.0, scale=0.7, off=None, z=0.0)
        self.config.text = lambda: self.config

    def get_output_embeddings(self):
        return self.cls.out

    def forward(self, x, labels=None, return_dict=True, index=1, **kwargs):
        hidden = self.body(x)
{tail}
'''

LOSS = """
loss = None
if labels is not None:
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
"""
RETURN = "return Output(loss=loss, logits=logits, hidden_states=(hidden,))"
HEAD = "logits = self.lm_head(hidden)"


def tail(*parts):
    return "\n".join(parts)


def source(text):
    return MODULE.replace("{tail}", textwrap.indent(text, "        "))


def site_of(text):
    (found,) = sites_of(idiom, source(text))
    return found


ROUTED = {
    "plain": tail(HEAD, LOSS, RETURN),
    "positional": tail(
        HEAD,
        "loss = None",
        "if labels is not None:",
        "    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)",
        RETURN,
    ),
    "no keywords": tail(HEAD, LOSS.replace(", **kwargs", ""), RETURN),
    "sliced": tail("logits = self.lm_head(hidden[:, 0:, :])", LOSS, RETURN),
    "cast input": tail("logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()", LOSS, RETURN),
    "contiguous": tail("logits = self.lm_head(hidden).contiguous()", LOSS, RETURN),
    "one of several heads": tail("logits = self.heads[index](hidden)", LOSS, RETURN),
    "module head": tail("logits = self.cls(hidden)", LOSS, RETURN),
    "scaled": tail(HEAD, "logits = logits * self.config.scale", LOSS, RETURN),
    "divided": tail(HEAD, "logits = logits / self.config.scale", LOSS, RETURN),
    "scaled if": tail(HEAD, "if self.config.scale is not None:", "    logits = logits * self.config.scale", LOSS, RETURN),
    "capped": tail(
        HEAD, "if self.config.cap is not None:", "    logits = logits / self.config.cap",
        "    logits = torch.tanh(logits)", "    logits = logits * self.config.cap", LOSS, RETURN,
    ),
    "capped in float32": tail(
        HEAD,
        "if self.config.cap is not None:",
        "    logits = logits.float() / self.config.cap",
        "    logits = logits.tanh() * self.config.cap",
        LOSS,
        RETURN,
    ),
    "capped with a local": tail(HEAD, "cap = self.config.cap", "logits = F.tanh(logits / cap) * cap", LOSS, RETURN),
    "capped with a walrus": tail(
        HEAD, "if (cap := self.config.cap) is not None:", "    logits = logits / cap",
        "    logits = torch.tanh(logits)", "    logits = logits * cap", LOSS, RETURN,
    ),
    "scaled and capped": tail(HEAD, "logits = logits * self.config.scale", "logits = torch.tanh(logits / self.config.cap) * self.config.cap", LOSS, RETURN),
    "labels moved": tail(HEAD, LOSS.replace("not None:\n", "not None:\n    labels = labels.to(logits.device)\n"), RETURN),
    "other labels": tail(
        HEAD,
        "loss = None",
        "if labels is not None:",
        "    shifted = labels[..., :].contiguous()",
        "    loss = self.loss_function(logits=logits, labels=None, vocab_size=self.config.vocab_size,",
        "        shift_labels=shifted, **kwargs)",
        RETURN,
    ),
    "popped keyword": tail(
        HEAD,
        "loss = None",
        "if labels is not None:",
        '    shifted = kwargs.pop("shift_labels", labels)',
        "    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size,",
        "        shift_labels=shifted, **kwargs)",
        RETURN,
    ),
    "auxiliary loss": tail(
        HEAD,
        LOSS,
        "aux_loss = None",
        "if index:",
        "    aux_loss = balance(hidden, 0.1)  # of the router",
        "    if labels is not None:",
        "        loss += 0.5 * aux_loss.to(loss.device)",
        "return Output(loss=loss, aux_loss=aux_loss, logits=logits)",
    ),
    "moved labels used again": tail(
        HEAD,
        LOSS.replace("not None:\n", "not None:\n    labels = labels.to(logits.device)\n"),
        "aux_loss = (labels == 3).sum()",
        "return Output(loss=loss, aux_loss=aux_loss, logits=logits)",
    ),
    "a local in the output": tail(HEAD, "states = (hidden,)", LOSS, "return Output(loss=loss, logits=logits, hidden_states=states)"),
    "tuple on request": tail(HEAD, LOSS, "if not return_dict:", "    return (loss, logits)", RETURN),
    "output bound first": tail(HEAD, LOSS, "made = Output(loss=loss, logits=logits)", "return made"),
    "names of its own": tail(
        "asked = kernel = finish = 1", HEAD.replace("logits", "scores"), LOSS.replace("=logits", "=scores"),
        "return Output(loss=loss, logits=scores, aux_loss=asked + kernel + finish)",
    ),
    "capped by a module": tail("logits = self.lm_head(hidden).float()", "logits = self.cap(logits)", LOSS, RETURN),
    "the width of the logits": tail("logits = self.cap(self.lm_head(hidden))", LOSS.replace("self.config.vocab_size", "logits.shape[-1]"), RETURN),
    "no test": tail(HEAD, "loss = self.loss_function(logits, labels, self.config.vocab_size)", RETURN),
}  # fmt: skip


def run(scope, state, **kwargs):
    """Run one step of a model; return the output and the gradients."""
    torch.manual_seed(1)
    model = scope["Tiny"]().train()
    model.load_state_dict(state)
    x = torch.randn(2, 6, 8)
    labels = torch.randint(0, 11, (2, 6))
    labels[0, :2] = -100
    output = model(x, labels=labels, **kwargs)
    output.loss.backward()
    return model, output, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ROUTED)
def test_a_routed_forward_computes_the_same(name, backend):
    set_choice(f"linear_cross_entropy={backend}")
    site = site_of(ROUTED[name])
    assert site.status is Status.ROUTED, site.reason
    upstream, routed = executed(source(ROUTED[name])), executed(source(ROUTED[name]), [site])
    state = upstream["Tiny"]().state_dict()
    for kwargs in ({}, {"num_items_in_batch": 7}):
        _, expected, expected_grads = run(upstream, state, **kwargs)
        model, got, grads = run(routed, state, **kwargs)
        assert isinstance(got, LazyLogits), routed[SLOT].outcome(model)
        assert list(got) == list(expected)
        close(got.loss.detach(), expected.loss.detach(), 1e-6)
        assert torch.equal(got.logits, expected.logits) and got.logits.dtype is expected.logits.dtype
        for parameter, grad in expected_grads.items():
            assert (grads[parameter] is None) == (grad is None)
            if grad is not None:
                close(grads[parameter], grad, 3e-6)


@pytest.mark.parametrize("name", ["capped in float32", "scaled and capped", "cast input", "divided"])
def test_logits_are_rounded_where_upstream_rounds_them(name):
    set_choice("linear_cross_entropy=reference")
    site = site_of(ROUTED[name])
    outputs = []
    for sites in ([], [site]):
        torch.manual_seed(0)
        model = executed(source(ROUTED[name]), sites)["Tiny"]().bfloat16().train()
        outputs.append(model(torch.randn(2, 6, 8).bfloat16(), labels=torch.arange(12).reshape(2, 6) % 11))
    assert torch.equal(outputs[1].logits, outputs[0].logits)
    assert outputs[1].logits.dtype is outputs[0].logits.dtype
    assert torch.equal(outputs[1].loss, outputs[0].loss)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_logits_that_a_cast_rounds_are_upstreams(backend):
    set_choice(f"linear_cross_entropy={backend}")
    text = source(tail("logits = self.lm_head(hidden).to(torch.bfloat16)", LOSS, RETURN))
    upstream, routed = executed(text), executed(text, sites_of(idiom, text))
    _, expected, gradients = run(upstream, state := upstream["Tiny"]().state_dict())
    model, got, same = run(routed, state)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(same["lm_head.weight"], gradients["lm_head.weight"])
    assert routed[SLOT].outcome(model).reason == "logits are rounded to torch.bfloat16"
    # If logits already have this dtype, the cast does nothing.
    model.bfloat16()(torch.randn(2, 6, 8).bfloat16(), labels=torch.zeros(2, 6, dtype=torch.int64))
    assert routed[SLOT].outcome(model).backend == backend


def replaced_class(model, scope):
    model.cap = scope["Bent"](2.0)
    return "logits are not capped by Cap as it is written"


def replaced_forward(model, scope):
    model.cap.forward = lambda x: x * 3
    return "the module that caps logits has its own forward"


def hooked(model, scope):
    model.cap.register_forward_hook(lambda module, inputs, output: output * 3)
    return "the module that caps logits has hooks"


def edited(model, scope):
    scope["Cap"].forward = lambda self, x: x * 3
    return "logits are not capped by Cap as it is written"


def without_a_width(model, scope):
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return ""


@pytest.mark.parametrize("change", [replaced_class, replaced_forward, hooked, edited, without_a_width])
def test_a_changed_module_that_caps_logits_is_called(change):
    set_choice("linear_cross_entropy=torch")
    text = source(ROUTED["the width of the logits"])
    outputs, reasons = [], []
    for sites in ([], [site_of(ROUTED["the width of the logits"])]):
        torch.manual_seed(0)
        scope = executed(text, sites)
        model = scope["Tiny"]().train()
        reason = change(model, scope)
        outputs.append(model(torch.randn(2, 6, 8), labels=torch.arange(12).reshape(2, 6) % 11))
        reasons.append((reason, scope[SLOT].outcome(model).reason if sites else reason))
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert all(expected in said for expected, said in reasons)


def test_without_labels_and_for_tuples_upstream_answers():
    set_choice("linear_cross_entropy=torch")
    site = site_of(ROUTED["tuple on request"])
    scope = executed(source(ROUTED["tuple on request"]), [site])
    model = scope["Tiny"]().train()
    x = torch.randn(2, 6, 8)
    assert not isinstance(model(x), LazyLogits)
    loss, logits = model(x, labels=torch.zeros(2, 6, dtype=torch.int64), return_dict=False)
    assert logits.shape == (2, 6, 11) and loss.requires_grad
    assert scope[SLOT].outcome(model) is None


Z_LOSS = tail(
    HEAD,
    LOSS,
    "    if self.config.z > 0:",
    "        loss = loss + self.config.z * logits.logsumexp(-1).pow(2).mean()",
    RETURN,
)


def test_a_branch_that_uses_logits_is_left_to_upstream():
    set_choice("linear_cross_entropy=torch")
    site = site_of(Z_LOSS)
    assert "if labels is not None and not self.config.z > 0:" in site.edits[-1].text
    scope = executed(source(Z_LOSS), [site])
    model = scope["Tiny"]().train()
    x, labels = torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.int64)
    assert isinstance(model(x, labels=labels), LazyLogits)
    model.config.z = 0.5
    output = model(x, labels=labels)
    plain = model.loss_function(output.logits, labels, 11)
    assert torch.allclose(output.loss, plain + 0.5 * output.logits.logsumexp(-1).pow(2).mean())


BRANCHES = {
    "a step with something else than what is tested": "    logits = logits * self.config.scale",
    "two things at once": "    logits = logits * self.config.cap\n    hidden = hidden * 2",
    "back to what was there before": "    logits = raw",
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_that_kernels_cannot_repeat_is_left_to_upstream(name):
    text = tail(
        HEAD, "raw = logits", "logits = logits / 2", "if self.config.cap is not None:", BRANCHES[name], LOSS,
        RETURN,
    )  # fmt: skip
    site = site_of(text)
    assert site.status is Status.ROUTED
    assert "if labels is not None and not self.config.cap is not None:" in site.edits[-1].text
    assert site.captures["options"] == "dict(divisor=2)"


MISSED = {
    "logits edited in place": (tail(HEAD, "logits[..., 0] = 0", LOSS, RETURN), "another way"),
    "an unknown function of logits": (tail(HEAD, "logits = squash(logits)", LOSS, RETURN), "another way"),
    "tanh is the file's own": (tail("tanh = squash", HEAD, "logits = tanh(logits)", LOSS, RETURN), "another way"),
    "a module's cap and another": (tail(HEAD, "logits = torch.tanh(self.cap(logits) / 3.0) * 3.0", LOSS, RETURN), "unknown order"),
    "tanh without a cap": (tail(HEAD, "logits = torch.tanh(logits)", LOSS, RETURN), "unknown order"),
    "two caps": (tail(HEAD, "logits = torch.tanh(logits / self.config.cap) * self.config.scale", LOSS, RETURN), "unknown order"),
    "capped, then scaled": (
        tail(
            HEAD,
            "logits = torch.tanh(logits / self.config.cap) * self.config.cap",
            "logits = logits * self.config.scale",
            LOSS,
            RETURN,
        ),
        "unknown order",
    ),
    "divides the other way": (tail(HEAD, "logits = self.config.scale / logits", LOSS, RETURN), "another way"),
    "scaled in one branch of two": (
        tail(
            HEAD, "if self.config.scale is not None:", "    logits = logits * self.config.scale", "else:",
            "    logits = logits * 2", LOSS, RETURN,
        ),
        "another way",
    ),
    "vocabulary cut": (tail(HEAD, "logits = logits[..., :7]", LOSS, RETURN), "another way"),
    "the loss of other logits": (tail(HEAD, "other = self.heads[0](hidden)", LOSS.replace("logits=logits", "logits=other"), RETURN), "different logits"),
    "two heads added": (tail("logits = self.lm_head(hidden) + self.heads[0](hidden)", LOSS, RETURN), "where no head is called"),
    "the loss of a part": (tail(HEAD, LOSS.replace("=logits", "=logits[:, 1:]"), RETURN), "from logits"),
    "the output of other logits": (tail(HEAD, "raw = logits", "logits = logits * 2", LOSS, RETURN.replace("=logits", "=raw")), "different logits"),
    "logits changed after the loss": (tail(HEAD, LOSS, "logits = logits * 2", RETURN), "another way"),
    "logits read in the output": (tail(HEAD, LOSS, "return Output(loss=loss, logits=logits, aux_loss=logits.mean())"), "only as logits"),
    "a branch on the loss": (tail(HEAD, LOSS, "if loss is not None:", "    loss = loss + logits.mean()", RETURN), "another way"),
    "labels changed by a call": (tail(HEAD, "labels = labels.roll(1)", LOSS, RETURN), "not plain"),
    "labels changed in a branch": (tail(HEAD, "if index:", "    labels = labels[:, :1]", LOSS, RETURN), "a branch between"),
    "several losses": (tail(HEAD, LOSS, LOSS, RETURN), "several losses (lines "),
    "the loss in a loop": (tail(HEAD, "for _ in range(1):", textwrap.indent(LOSS, "    "), RETURN), "nested branch, or not bound"),
    "the loss in an else": (
        tail(
            HEAD,
            "loss = None",
            "if labels is None:",
            "    pass",
            "else:",
            "    loss = self.loss_function(logits, labels, self.config.vocab_size)",
            RETURN,
        ),
        "in an else",
    ),
    "the loss not bound": (tail(HEAD, LOSS.replace("loss = self.loss_function", "loss = 2 * self.loss_function"), RETURN), "not bound"),
    "a head with a second argument": (tail("logits = self.lm_head(hidden, index)", LOSS, RETURN), "more than"),
    "logits bound by a with": (tail("with torch.no_grad():", "    logits = self.lm_head(hidden)", LOSS, RETURN), "bound in a with"),
    "an output without logits": (tail(HEAD, LOSS, "return Output(loss=loss)"), "an output with the logits"),
    "a popped keyword used again": (
        tail(
            ROUTED["popped keyword"].replace(RETURN, ""),
            "return Output(loss=loss, logits=logits, aux_loss=shifted.sum())",
        ),
        "used after the loss",
    ),
    "what is popped are the labels": (ROUTED["popped keyword"].replace("labels=labels", "labels=shifted"), "uses a value popped"),
    "what is popped goes elsewhere": (ROUTED["popped keyword"].replace('"shift_labels"', '"ignore_index"'), "popped from kwargs"),
    "what is popped goes nowhere": (
        ROUTED["popped keyword"].replace("shift_labels=shifted, ", ""),
        "'shift_labels' is popped from kwargs and not passed to the loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_what_is_not_understood_is_not_routed(name):
    text, reason = MISSED[name]
    site = site_of(text)
    assert site.status is Status.MISSED and not site.edits and not site.slots
    assert reason in site.reason and "(line" in site.reason
    assert site.reason.startswith("nearest is next_token: ") and site.counted


def test_the_guard_reads_like_the_forward():
    site = site_of(ROUTED["capped"])
    assert [edit.marker for edit in site.edits] == [True, False]
    assert textwrap.dedent(site.edits[-1].text) == textwrap.dedent(
        f"""\
        if labels is not None:
            asked = (self, hidden, self.lm_head, labels, self.config.vocab_size, kwargs, dict(softcap=self.config.cap))
            if (kernel := {SLOT}.kernel(*asked)) is not None:
                loss, logits, finish = kernel(*asked)
                return finish(Output(loss=loss, logits=logits, hidden_states=(hidden,)))
        """
    )
    assert (
        site.captures["head"] == "self.lm_head"
        and site.captures["options"] == "dict(softcap=self.config.cap)"
    )
    assert site.slots == (SlotSpec(SLOT, "linear_cross_entropy", "next_token"),)
    assert site.target == "Tiny.forward"


def test_a_form_is_the_same_for_what_computes_the_same():
    forms = {name: site_of(ROUTED[name]).form for name in ROUTED}
    assert forms["plain"] == forms["positional"] == forms["sliced"] == forms["contiguous"]
    assert forms["capped"] == forms["capped with a walrus"] == forms["capped with a local"]
    assert len({forms[name] for name in ("plain", "no keywords", "scaled", "divided", "capped")}) == 5
    assert forms["auxiliary loss"] != forms["plain"]


def test_what_is_copied_asks_the_slots_of_other_sites(monkeypatch):
    text = source(ROUTED["auxiliary loss"])
    slot = SlotSpec("veomni_load_balancing_loss_x", "rms_norm", "cast_before_weight")
    places = [text.index("balance(hidden"), text.index("balance(router")]
    edits = tuple(Edit(at, at + len("balance"), f"{slot.name}.at(self, balance)") for at in places)
    other = Site("load_balancing_loss", "Tiny.forward", Status.ROUTED, edits=edits, slots=(slot,))
    monkeypatch.setattr(idiom, "find_load_balancing_losses", lambda view: [other])
    site = site_of(ROUTED["auxiliary loss"])
    guard = site.edits[-1].text
    assert f"aux_loss = {slot.name}.at(self, balance)(hidden, 0.1)" in guard
    assert slot in site.slots
    assert slot not in site_of(ROUTED["plain"]).slots
    elsewhere = Site("load_balancing_loss", "squash", Status.ROUTED, edits=edits[1:], slots=(slot,))
    monkeypatch.setattr(idiom, "find_load_balancing_losses", lambda view: [elsewhere])
    assert slot not in site_of(ROUTED["auxiliary loss"]).slots


def test_a_forward_in_one_line_cannot_take_a_guard():
    text = ROUTED["plain"].replace("logits = self.lm_head", "pass; logits = self.lm_head")
    site = site_of(text)
    assert site.status is Status.MISSED and "does not begin" in site.reason


LISTED = '''
class Detector:
    def forward(self, images, labels):
        return self.loss_function(self.head(images), labels, self.device, self.config, boxes=1)

class Classifier:
    def forward(self, x, labels):
        logits = self.score(x)
        pooled_logits = logits[torch.arange(2), 0]
        loss = self.loss_function(logits=logits, pooled_logits=pooled_logits, labels=labels)
        return Output(loss=loss, logits=pooled_logits)

class Quiet:
    def forward(self, x):
        """Names self.loss_function and calls nothing."""
        return x

class Language:
    def compute(self, x, labels):
        return self.loss_function(x, labels, self.config.vocab_size)
'''


def test_other_losses_are_listed_too():
    site, apart = sites_of(idiom, LISTED)
    assert apart.target == "Language.compute" and "in another method than forward" in apart.reason
    assert site.target == "Detector.forward" and site.status is Status.MISSED and site.counted
    assert site.reason.startswith(idiom.NOT_CAUSAL) and "self.device, self.config, boxes=" in site.reason
    assert idiom.NOT_CAUSAL in idiom.CANDIDATES


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "class Wide(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)[..., :11]",
            "Wide",
        ),
        ("class Wide(nn.Linear):\n    extra = 1", None),
        ("class Wide(nn.Module):\n    def forward(self, x):\n        return x", None),
    ],
)
def test_a_head_that_is_a_linear_of_the_files_own(kind, reason):
    text = source(ROUTED["plain"]).replace("class Decoder", f"{kind}\n\n\nclass Decoder")
    text = text.replace("        self.heads", "        self.lm_head = Wide(8, 11)\n        self.heads")
    (site,) = sites_of(idiom, text)
    assert site.status is (Status.ROUTED if reason is None else Status.MISSED)
    assert reason is None or f"self.lm_head is a {reason}" in site.reason


def test_keywords_that_the_loss_does_not_get_are_an_option():
    site = site_of(ROUTED["no keywords"])
    assert (site.captures["loss_kwargs"], site.captures["options"]) == ("{}", "dict(keywords=kwargs)")
    assert "options" not in site_of(ROUTED["plain"]).captures
    other = tail("kwargs = None", HEAD, LOSS.replace(", **kwargs", ""), RETURN)
    assert "options" not in site_of(other).captures
