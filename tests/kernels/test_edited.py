"""Sources of upstream's that users edit and execute: the edited code runs, above which a guard still stands.

Every case edits the patched module and the installed one, which is the oracle: results have to be equal, and
different from those before.
"""

from __future__ import annotations

import inspect
import pickle
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.test_replaced import TOKENS, models, same, step
from veomni_hook.errors import RoutingError
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.slot import Slot
from veomni_hook.routing import record
from veomni_hook.tools.report.explanation import explain

EDITED = "the function that asks is an edited copy of the patched code"
#: Of methods: a piece of upstream's code, and what stands there afterwards.
EDITS = {
    "Qwen3MLP.forward": ("return down_proj", "return down_proj * 0.5"),
    "Qwen3Attention.forward": (".transpose(1, 2)\n", ".transpose(1, 2) * 1.5\n"),
    "Qwen3RMSNorm.forward": ("hidden_states.to(input_dtype)", "hidden_states.to(input_dtype) * 2"),
    "Qwen3DecoderLayer.forward": ("residual + hidden_states", "residual + 0.5 * hidden_states"),
    "Qwen3ForCausalLM.forward": ("= self.lm_head(", "= 0.5 * self.lm_head("),
    "Qwen3MoeExperts.forward": (".act_fn(gate) * up", ".act_fn(gate) * up * 2"),
    "Qwen3MoeTopKRouter.forward": ("softmax(router_logits,", "softmax(router_logits * 3,"),
    "Qwen3MoeForCausalLM.forward": ("loss += self.router", "loss += 5 * self.router"),
    "Gemma3Attention.forward": ("cos, sin = position", "sin, cos = position"),
    "GptOssExperts.forward": ("out * routing_weights", "out * 2 * routing_weights"),
}


@pytest.fixture(autouse=True)
def chosen():
    set_choice("torch")


def edited(module: types.ModuleType, place: str, scope: dict[str, Any] | None = None) -> Callable[..., Any]:
    """What people make of a method: its source with another line, executed."""
    kind, method = place.split(".")
    lines = inspect.getsource(inspect.unwrap(getattr(getattr(module, kind), method))).splitlines(
        keepends=True
    )
    while not lines[0].lstrip().startswith("def "):
        del lines[0]  # decorators
    source = textwrap.dedent("".join(lines))
    old, new = (textwrap.indent(each, "    ") if "\n" in each.rstrip() else each for each in EDITS[place])
    assert old in source
    scope = dict(vars(module)) if scope is None else scope
    exec(source.replace(old, new), scope)
    return scope[method]


def on_class(module, model, place, patch):
    kind, method = place.split(".")
    patch.setattr(getattr(module, kind), method, edited(module, place))


def in_the_modules_globals(module, model, place, patch):
    kind, method = place.split(".")
    patch.setitem(vars(module), method, None)
    patch.setattr(getattr(module, kind), method, edited(module, place, vars(module)))


def on_instances(module, model, place, patch):
    kind, method = place.split(".")
    function = edited(module, place)
    for each in model.modules():
        if type(each) is getattr(module, kind):
            setattr(each, method, types.MethodType(function, each))


def in_subclass(module, model, place, patch):
    kind, method = place.split(".")
    derived = type(kind, (getattr(module, kind),), {method: edited(module, place)})
    for each in model.modules():
        if type(each) is getattr(module, kind):
            each.__class__ = derived


def below_a_wrapper(module, model, place, patch):
    kind, method = place.split(".")
    function = edited(module, place)
    patch.setattr(
        getattr(module, kind), method, lambda self, *args, **kwargs: function(self, *args, **kwargs)
    )


CASES = [
    *((on_class, place) for place in EDITS),
    *((make, "Qwen3MLP.forward") for make in (on_instances, in_subclass, below_a_wrapper)),
    *((make, "Qwen3Attention.forward") for make in (on_instances, in_the_modules_globals, below_a_wrapper)),
    (in_subclass, "Qwen3MoeExperts.forward"),
]
FAMILY = {"Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe", "Gemma3": "gemma3", "GptOss": "gpt_oss"}


def family_of(place: str) -> str:
    return FAMILY[max((name for name in FAMILY if place.startswith(name)), key=len)]


@pytest.mark.parametrize(("edit", "place"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_the_edited_code_runs(modules, monkeypatch, edit, place):
    family = family_of(place)
    upstream, patched = models(modules(family), family)
    if family in ("qwen3_moe", "gpt_oss"):  # which experts are compared must not depend on the implementation
        upstream.config._experts_implementation = patched.config._experts_implementation = "eager"
    before = step(patched)
    assert same(step(upstream), before)
    for module, model in zip(modules(family), (upstream, patched), strict=True):
        edit(module, model, place, monkeypatch)
    expected, found = step(upstream), step(patched)
    assert not same(expected, before), "nothing was edited"
    assert same(expected, found), explain(patched)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_next", "gemma3", "gpt_oss"])
def test_lines_that_other_tools_replace_are_there_and_what_they_write_runs(modules, monkeypatch, family):
    """As Axolotl's LoRA kernels: all projections of a method, side by side, are searched for by their text."""
    upstream, patched = models(modules(family), family)
    before = step(patched)
    place = next(each for each in dir(modules(family)[0]) if each.endswith("Attention"))
    source = inspect.getsource(inspect.unwrap(getattr(modules(family)[0], place).forward))
    lines = source.splitlines(keepends=True)
    first, *_, last = (number for number, line in enumerate(lines) if re.search(r"self\.[qkv]_proj\(", line))
    searched = textwrap.dedent("".join(lines[first : last + 1]))
    written = searched + "value_states = value_states * value_states\n"
    monkeypatch.setitem(EDITS, f"{place}.forward", (searched, written))
    for module, model in zip(modules(family), (upstream, patched), strict=True):
        on_class(module, model, f"{place}.forward", monkeypatch)
    expected, found = step(upstream), step(patched)
    assert not same(expected, before) and same(expected, found), explain(patched)


def test_explain_says_so(modules, monkeypatch):
    module = modules("qwen3")[1]
    _, patched = models(modules("qwen3"), "qwen3")
    on_class(module, patched, "Qwen3MLP.forward", monkeypatch)
    before = [row for row in explain(patched).rows if row.op == "gated_mlp"]
    assert all(row.backend == "replaced" and "forward" in row.reason for row in before)
    step(patched)
    rows = [row for row in explain(patched).rows if row.op == "gated_mlp"]
    assert rows and all(row.backend == "eager" and EDITED in row.reason for row in rows)
    assert all("<string>, line 1" in row.reason for row in rows)


def test_other_globals_are_an_edit(modules, monkeypatch):
    """The same code with another helper in its globals."""
    upstream, patched = models(modules("qwen3"), "qwen3")
    before = step(patched)
    for module in modules("qwen3"):
        function = inspect.unwrap(module.Qwen3Attention.forward)  # a release's decorators may stand around it
        scope = {**vars(module), "apply_rotary_pos_emb": lambda q, k, *_: (q, 2 * k)}
        copied = types.FunctionType(function.__code__, scope, "forward", function.__defaults__)
        monkeypatch.setattr(module.Qwen3Attention, "forward", copied)
    expected = step(upstream)
    assert not same(expected, before) and same(expected, step(patched))


def test_a_module_that_is_executed_again_edited(modules, monkeypatch):
    module = modules("qwen3")[1]
    source = inspect.getsource(module).replace(*EDITS["Qwen3MLP.forward"])
    for scope in (dict(vars(module)), vars(module)):
        kept = dict(scope)
        try:
            exec(compile(source, module.__file__, "exec"), scope)
            kind = scope["Qwen3MLP"]
            model = models((modules("qwen3")[0], types.SimpleNamespace(**scope)), "qwen3")[1]
            step(model)
            rows = [row for row in explain(model).rows if row.op in ("gated_mlp", "add_rms_norm")]
        finally:
            scope.update(kept)
        assert kind is not module.Qwen3MLP and rows and all(row.backend == "eager" for row in rows)


def test_a_module_that_is_imported_again_keeps_its_kernels(modules):
    """Also for objects from before: their code is another object, and equal."""
    module = modules("qwen3")[1]
    _, before = models(modules("qwen3"), "qwen3")
    kept = dict(vars(module))
    try:
        module.__spec__.loader.exec_module(module)
        _, after = models((modules("qwen3")[0], module), "qwen3")
        for model in (before, after):
            step(model)
            rows = [row for row in explain(model).rows if row.op == "gated_mlp"]
            assert rows and all(row.backend == "torch" for row in rows), rows
    finally:
        vars(module).update(kept)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["Qwen3MLP.forward", "Qwen3Attention.forward"])
def test_compiled(modules, monkeypatch, place):
    torch._dynamo.reset()
    pair = modules("qwen3")
    upstream, patched = models(pair, "qwen3", num_hidden_layers=1, layer_types=["full_attention"])
    before = upstream.model(TOKENS, use_cache=False).last_hidden_state
    for module in pair:
        on_class(module, None, place, monkeypatch)
    compiled = torch.compile(patched.model, backend="eager")
    expected, found = (each(TOKENS, use_cache=False).last_hidden_state for each in (upstream.model, compiled))
    assert not torch.allclose(expected, before, atol=1e-4), "nothing was edited"
    assert torch.allclose(expected, found, atol=1e-4)
    kind = place.partition(".")[0]
    rows = [row for row in explain(patched).rows if row.kind.endswith(kind) and row.compiled]
    assert rows and all(row.backend == "replaced" and ".forward" in row.reason for row in rows), rows
    others = [row for row in explain(patched).rows if row.op == "add_rms_norm"]
    assert others and all(row.backend == "torch" for row in others)


@pytest.mark.slow
def test_after_a_graph_break_the_code_is_the_patched_one(modules, monkeypatch):
    """dynamo makes functions of its own of the code before and after it."""
    torch._dynamo.reset()
    _, patched = models(modules("qwen3"), "qwen3", num_hidden_layers=1, layer_types=["full_attention"])
    layer = patched.model.layers[0]
    monkeypatch.setattr(layer.self_attn, "forward", torch.compiler.disable(layer.self_attn.forward))
    compiled = torch.compile(patched.model, backend="eager")
    compiled(TOKENS, use_cache=False)
    rows = [row for row in explain(patched).rows if row.op in ("add_rms_norm", "qk_norm_rotary")]
    assert len(rows) == 2 and all(row.backend == "torch" for row in rows), rows


def test_a_router_that_was_edited_is_not_recorded(modules, monkeypatch):
    module = modules("qwen3_moe")[1]
    _, patched = models(modules("qwen3_moe"), "qwen3_moe")
    on_class(module, patched, "Qwen3MoeTopKRouter.forward", monkeypatch)
    with pytest.raises(RoutingError, match=EDITED), record(patched):
        step(patched)


SLOT = Slot("gated_mlp", "product", __name__)


def test_a_copy_by_value_runs_upstreams_code():
    """What pickles functions by value makes another slot, which knows no text."""
    copied, mlp = pickle.loads(pickle.dumps(SLOT)), nn.Linear(2, 2)
    assert SLOT.kernel(mlp, torch.ones(2, 2), nn.SiLU()) is not None
    assert copied.kernel(mlp, torch.ones(2, 2), nn.SiLU()) is None
    assert EDITED in copied.outcome(mlp).reason


def test_slots_that_a_script_makes_are_asked_by_all():
    """Cells of a notebook are modules of this name, too."""
    scope = {"__name__": "__main__", "Slot": Slot}
    exec('slot = Slot("gated_mlp", "product", __name__)', scope)
    assert scope["slot"].kernel(nn.Linear(2, 2), torch.ones(2, 2), nn.SiLU()) is not None
