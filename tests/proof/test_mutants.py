"""Mutants: what they are, a sample of them, and that they tell when an idiom is sloppy."""

import ast

import pytest

from tests.proof.mutants import bodies, mutants
from tests.proof.test_proof import run

SOURCE = """
import torch

def turn(x):
    return torch.cat((-x[..., 1:], x[..., :1]), dim=-1)

class Layer(Base):
    def __init__(self, config):
        self.size, self.limit = config.size, 1e-6

    def forward(self, x, y=2):
        z = x.float() * 2  # twice
        total = 0
        for part in range(self.size):
            total += turn(z) if part == y else self._other(z, scale=y)
        if y is not None:
            z = z / total
        return (z - y).mean(-1, keepdim=True)

    def _other(self, x, scale):
        return x * scale
"""

#: Runs mutants of Qwen3's rotary function, first as it is, then while its idiom takes whatever is in its place.
SLOPPY = """
from tests.proof import runner
runner._start()
from veomni_hook.patches.graph import Match
from veomni_hook.patches.graph import forms as graph_forms

right, seen = graph_forms.match, {}
def sloppy(pattern, form, rules):
    made = right(pattern, form, rules)
    if isinstance(made, Match):
        seen.setdefault(pattern.result, made)
    return seen.get(pattern.result, made)

from collections import Counter
from tests.proof.judge import forms, judge
(form,) = forms(["transformers.models.qwen3.modeling_qwen3"], ["rotary"])
for match in (right, sloppy):
    graph_forms.match = match
    outcomes = Counter(one.outcome for one in judge(form, 10, 0))
    print(match.__name__, outcomes.total(), outcomes["refused"], outcomes["false positive"])
"""


def test_every_mutant_is_another_program():
    found = list(mutants(SOURCE, bodies(SOURCE, "Layer.forward"), 80, seed=0))
    programs = {ast.dump(ast.parse(source)) for _, source in found}
    assert len(programs) == len(found) == 80
    assert ast.dump(ast.parse(SOURCE)) not in programs


def test_mutants_are_the_same_for_the_same_seed():
    first, again, other = (list(mutants(SOURCE, ["turn"], 20, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.slow
def test_everything_that_a_body_is_made_of_is_changed():
    names = bodies(SOURCE, "Layer.forward")
    assert names == ["Layer.forward", "turn", "Layer._other", "Layer.__init__"]
    labels = [label for label, _ in mutants(SOURCE, names, 200, seed=0)]
    assert {label.split()[0] for label in labels} == {"forward", "turn", "_other", "__init__"}
    text = "\n".join(labels)
    for change in (
        "Eq to", "IsNot to Is", "float dropped", "statement dropped", "statement repeated", "statement after the next",
        "augmented", "list(range(", "under no_grad", ".detach()", "torch.no_grad() added", "register_hook",
    ):  # fmt: skip
        assert change in text, change


@pytest.mark.slow  # and there is `make proof`
def test_a_sample_of_mutants_is_refused_or_equal(tmp_path):
    ops = ("rms_norm", "rotary", "gated_mlp", "moe_router", "load_balancing_loss", "linear_cross_entropy")
    chosen = [word for op in ops for word in ("--op", op)]
    command = (
        "-m",
        "tests.proof.mutate",
        "qwen3_moe",
        *chosen,
        "--count",
        "2",
        "--workers",
        "1",
        "--seed",
        "5",
    )
    done = run(*command, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 mutants of 6 forms" in done.stdout
    assert "0 failures (seed 5)" in done.stdout


@pytest.mark.slow
def test_mutants_tell_a_sloppy_idiom(tmp_path):
    done = run("-c", SLOPPY, cache=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {name: tuple(map(int, numbers)) for name, *numbers in lines}
    assert found.keys() == {"match", "sloppy"}, done.stdout + done.stderr
    (count, refused, wrong), (again, refused_still, wrong_then) = found["match"], found["sloppy"]
    assert count == again == 10
    assert wrong == 0 < wrong_then
    assert refused_still < refused
