"""The sentence at the end of `explain`: what is fused, what is not, and what to do next."""

import pytest
from torch import nn

from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.kernels.explain.rows import Row
from veomni_hook.kernels.explain.summary import CHANGE, NOTHING, summary
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.kernels.slot.record import Calls
from veomni_hook.tools.report.explanation import explain


def place(backend, reason="chosen", *, op="rms_norm", training=0, evaluation=0, remedy=CHANGE, **more):
    """A row whose calls all got the same."""
    calls = {
        mode: (Calls(backend, reason, times),)
        for mode, times in (("training", training), ("evaluation", evaluation))
        if times
    }
    called = bool(calls) or more.pop("called", False)
    values = {"backend": backend, "reason": reason, "choice": "auto", "called": called, "remedy": remedy}
    return Row("", "Norm", "slot", op, "cast_before_weight", **values, **calls, **more)


ON_CPU = "kernels=auto on cpu"
CASES = {
    "all": (
        [place("torch", training=1), place("triton", training=1, op="rotary")],
        "In training, 2 of 2 places run fused kernels (rms_norm, rotary); next: nothing.",
    ),
    "the commonest reason, with its remedy": (
        [
            place("torch", training=2),
            place("eager", "has hooks", training=1),
            place("eager", "has hooks", op="gated_mlp", training=1),
            place("eager", "is slow; choose torch by name", remedy="choose torch by name", training=3),
        ],
        "In training, 1 of 4 places run fused kernels (rms_norm); not rms_norm at 2, gated_mlp, mostly because "
        f"has hooks; next: {CHANGE}.",
    ),
    "a reason that has its remedy says it once": (
        [place("eager", "is slow; choose torch by name", remedy="choose torch by name", training=1)],
        "In training, none of 1 place run fused kernels, because is slow; next: choose torch by name.",
    ),
    "training counts, not what came after it": (
        [place("torch", training=1), place("eager", "in eval mode", op="loss", evaluation=1)],
        "In training, 1 of 1 place run fused kernels (rms_norm); 1 place not called yet; next: nothing.",
    ),
    "evaluation alone": (
        [place("torch", evaluation=1)],
        "In evaluation, 1 of 1 place run fused kernels (rms_norm); next: nothing.",
    ),
    "nothing called": (
        [place("torch", ON_CPU), place("eager", ON_CPU, op="rotary")],
        "Before the first call: 1 of 2 places can run fused kernels (rms_norm); not rotary; "
        "next: train a step, and explain the model again.",
    ),
    "a choice that cannot run": (
        [place("none", "no triton; choose torch", remedy="choose torch"), place("torch", ON_CPU)],
        "Before the first call: 1 of 2 places can run fused kernels (rms_norm); not rms_norm at 1; "
        "next: choose torch.",
    ),
    "code of others": (
        [place("replaced", "replaced by liger", settled=True, remedy=NOTHING), place("torch", training=1)],
        "In training, 1 of 2 places run fused kernels (rms_norm); not rms_norm at 1, because they are replaced "
        f"by liger; next: {CHANGE}.",
    ),
    "code of a trainer that calls our kernel itself": (
        [
            place("replaced", "replaced by verl", settled=True, remedy=f"{NOTHING}: verl's head is ours"),
            place("torch", training=1),
        ],
        "In training, 1 of 2 places run fused kernels (rms_norm); not rms_norm at 1, because they are replaced "
        "by verl; next: nothing: verl's head is ours.",
    ),
    "compiled": (
        [place("eager", "left to Inductor", called=True, compiled="itself", remedy=NOTHING)],
        "None of 1 place run fused kernels, because they are left to Inductor; next: nothing.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_fused_what_is_not_and_what_to_do_next(case):
    rows, said = CASES[case]
    assert summary(rows) == said


class TestOfAModel:
    def last(self, model):
        text = str(explain(model))
        assert explain(model)._repr_html_().endswith("</p>")
        return text.splitlines()[-1]

    def test_it_is_the_last_line(self, patched):
        set_choice("torch")
        _, model = pair(patched)
        assert self.last(model).startswith("Before the first call: 18 of 18 places can")
        model(**batch()).loss.backward()
        assert self.last(model).startswith(
            "In training, 18 of 18 places run fused kernels (linear_cross_entropy"
        )
        assert self.last(model).endswith("; next: nothing.")
        assert self.last(model) in explain(model).to_html()
        assert "next:" not in str(explain(nn.Identity()))

    @pytest.mark.parametrize(
        ("choice", "changed", "remedy"),
        [
            ("eager", None, "choose auto or a backend instead of eager"),
            ("torch", lambda model: model.double(), CHANGE),
            (
                "auto",
                None,
                "use a machine that has what its kernel needs (triton needs a device of type cuda, found cpu)",
            ),
        ],
        ids=["chosen", "refused", "the device"],
    )
    def test_the_remedy_follows_from_who_refused(self, patched, choice, changed, remedy):
        set_choice(choice)
        _, model = pair(patched)
        if changed is not None:
            changed(model)
        model(**batch())
        assert self.last(model).endswith(f"; next: {remedy}.")

    def test_upstreams_code_that_is_as_fast_needs_no_remedy(self, patched):
        set_choice("auto,add_rms_norm=torch,qk_norm_rotary=torch,gated_mlp=torch")
        _, model = pair(patched)
        model(**batch())
        assert self.last(model).endswith(
            "because with so few logits, upstream's code is as fast; next: nothing."
        )

    def test_the_hook_is_deactivated(self, patched):
        _, model = pair(patched)
        set_active(False)
        assert self.last(model).endswith(
            "because veomni_hook is deactivated; next: call veomni_hook.activate()."
        )
