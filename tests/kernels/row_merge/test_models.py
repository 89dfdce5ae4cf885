"""Small models with towers: patched as upstream, in results and every gradient, with a kernel at each merge."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import twins
from tests.kernels.row_merge.towers import FAMILIES, Family
from veomni_hook.kernels.selection.process_choice import set_choice

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def chosen():
    set_choice("eager,row_merge=torch")


def pair(family: Family, modules: Any, dtype: torch.dtype = torch.float32) -> tuple[ModuleType, list[Any]]:
    """The patched module; upstream's model and the patched one with equal weights."""
    home, patched = modules(family.name)
    torch.manual_seed(0)
    theirs, ours = twins(home, patched, family.model, family.config())
    # Towers and language models come from transformers' tables of classes, which have upstream's.
    for module in ours.modules():
        if type(module).__module__ == home.__name__:
            module.__class__ = getattr(patched, type(module).__name__)
    return patched, [theirs.to(dtype), ours.to(dtype)]


def trained(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The loss and the logits of a step, and every gradient."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters()}
    return {"the loss": output.loss.detach(), "the logits": output.logits.detach(), **grads}


def assert_equal_steps(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(
        each.abs().max().item() for name, each in theirs.items() if name[:3] != "the" and each is not None
    )
    for name, truth in theirs.items():
        if truth is None or ours[name] is None:
            assert ours[name] is None and truth is None, name
        elif truth.abs().max() > largest * 1e-5:  # others are rounding alone
            close(ours[name], truth, tolerance)
        else:
            assert ours[name].abs().max() <= largest * 1e-5, name


def answers(patched: ModuleType, model: Any) -> dict[str, set[tuple[str, str]]]:
    """What the slots of the op answered the modules of a model, by variant."""
    slots = [each for each in vars(patched).values() if getattr(each, "op", "") == "row_merge"]
    found: dict[str, set[tuple[str, str]]] = {each.variant: set() for each in slots}
    for slot in slots:
        found[slot.variant].update(
            slot.outcome(module) for module in model.modules() if slot.records.of(module)
        )
    return found


@pytest.mark.sample(2)
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_upstreams(name, backend, modules):
    family = FAMILIES[name]
    patched, models = pair(family, modules)
    set_choice(f"eager,row_merge={backend}")
    torch.manual_seed(1)
    models = [model.to(DEVICE) for model in models]
    batch = {key: each.to(DEVICE) for key, each in family.batch().items()}
    theirs, ours = (trained(model, batch) for model in models)
    assert_equal_steps(ours, theirs, 1e-5)
    found = answers(patched, models[1])
    for variant in family.variants:
        assert {backend_ for backend_, _ in found[variant]} == {backend}, found


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_a_step_in_bfloat16(name, modules):
    family = FAMILIES[name]
    _, models = pair(family, modules, torch.bfloat16)
    torch.manual_seed(1)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in family.batch().items()}
    theirs, ours = (trained(model, batch) for model in models)
    assert_equal_steps(ours, theirs, 1e-6)


def test_without_a_choice_upstreams_code_runs_on_a_cpu(modules):
    set_choice("auto")
    family = FAMILIES["qwen3_vl"]
    patched, models = pair(family, modules)
    torch.manual_seed(1)
    batch = family.batch()
    theirs, ours = (trained(model, batch) for model in models)
    assert_equal_steps(ours, theirs, 1e-5)
    assert {backend for each in answers(patched, models[1]).values() for backend, _ in each} == {"eager"}


def test_a_wrong_number_of_tokens_is_upstreams_error(modules):
    family = FAMILIES["qwen2_5_vl"]
    _, models = pair(family, modules)
    batch = family.batch()
    ids = batch["input_ids"].clone()
    ids[0, 3] = 7
    said = []
    for model in models:
        with pytest.raises(ValueError, match="tokens: 7, features: 8") as caught:
            model(**{**batch, "input_ids": ids})
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_checks_can_be_switched_off(modules, monkeypatch):
    """Then the merge finds too few rows, or leaves some: as upstream's."""
    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
    family = FAMILIES["llava"]
    _, models = pair(family, modules)
    batch = family.batch()
    fewer, more = batch["input_ids"].clone(), batch["input_ids"].clone()
    fewer[0, 1], more[0, 0] = 7, 60
    for model in models:
        with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
            model(**{**batch, "input_ids": more})
    theirs, ours = (trained(model, {**batch, "input_ids": fewer}) for model in models)
    assert_equal_steps(ours, theirs, 1e-5)


def test_a_replaced_method_is_called(modules, monkeypatch):
    family = FAMILIES["llava"]
    patched, models = pair(family, modules)
    scatter, called = torch.Tensor.masked_scatter, []

    def counted(self, mask, source):
        called.append(self)
        return scatter(self, mask, source)

    monkeypatch.setattr(torch.Tensor, "masked_scatter", counted)
    batch = family.batch()
    for model in models:
        model(**batch)
    assert len(called) == 2
    assert any("was replaced" in reason for _, reason in answers(patched, models[1])["rows"])


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="dynamo does not trace upstream's own"
)
def test_compiled_checks_are_upstreams_own(modules):
    set_choice("auto")
    family = FAMILIES["qwen2_5_vl"]
    _, models = pair(family, modules)
    ids, embeds, features = family.batch()["input_ids"], torch.randn(2, 14, 32), torch.randn(8, 32)

    def masks(model: Any) -> Any:
        return model.model.get_placeholder_mask(ids, inputs_embeds=embeds, image_features=features)

    # Dynamo does not trace the check of earlier releases.
    whole = Version(transformers.__version__) >= Version("5.9")
    torch.compiler.reset()
    compiled = [torch.compile(masks, backend="eager", fullgraph=whole)(model) for model in models]
    assert all(map(torch.equal, *compiled)) and compiled[0][0].any()
