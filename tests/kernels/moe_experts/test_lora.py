"""LoRA on experts' stacked weights: the kernels get PEFT's factors, and the sum with the weights is never formed."""

import contextlib
import copy

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from tests.kernels.matching import DEVICE, close, grads_of
from tests.kernels.moe_experts.backends import BACKENDS
from veomni_hook.kernels.moe_experts import peft_adapters, tiles
from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.shared.sizes import SIZES as SIZES_OF_KERNELS
from veomni_hook.tools.report.explanation import explain

peft = pytest.importorskip("peft")
layer = pytest.importorskip("peft.tuners.lora.layer")

# Grouped products of a GPU are in bfloat16.
GROUPED = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# Of the loss, and of a gradient.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 6e-2)}
WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
GPT_OSS = {
    **{key: SIZES[key] for key in SIZES if key not in {"moe_intermediate_size", "num_experts"}},
    "intermediate_size": 16,
    "num_local_experts": 4,
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "pad_token_id": 0,
}

pytestmark = pytest.mark.usefixtures("anywhere")


@pytest.fixture(autouse=True)
def chosen():
    set_choice("eager,moe_experts=torch")


@pytest.fixture
def homes(modules):
    return modules("qwen3_moe")


@pytest.fixture
def only_factors(monkeypatch):
    """The sum of weights and adapters is not formed."""

    def fail(*_):
        raise AssertionError("the sum was formed")

    monkeypatch.setattr(layer._LoraParameterProxy, "forward", fail)
    monkeypatch.setattr(peft_adapters, "_sum", fail)
    if hasattr(layer, "_LoraFactorsProxy"):
        monkeypatch.setattr(layer._LoraFactorsProxy, "forward", fail)


def adapted(home, config=None, kind="Qwen3MoeForCausalLM", **options):
    torch.manual_seed(0)
    model = getattr(home, kind)(config or Qwen3MoeConfig(**SIZES)).to(DEVICE)
    lora = peft.LoraConfig(**{"r": 4, "target_modules": [], "target_parameters": WEIGHTS, **options})
    found = peft.get_peft_model(model, lora)
    return randomised(found)


def randomised(model):
    torch.manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        # B is zeros before. Routers choose clearly: where bfloat16 changes a choice, nothing is comparable.
        torch.nn.init.normal_(parameter, std=0.5 if "lora" in name or ".gate." in name else 0.1)
    return model


def step(model, context=contextlib.nullcontext):
    ids = torch.arange(24, device=DEVICE).view(2, 12)
    model.zero_grad()
    with context():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), grads_of(model)


def compared(homes, **options):
    """The patched model, after a step that was upstream's."""
    upstream, model = (adapted(home, **options).to(GROUPED) for home in homes)
    assert_same(upstream, model, GROUPED)
    return model


def checkpointed(homes, *, reentrant=False):
    """Upstream's model and the patched one, with checkpoints of layers."""
    models = [adapted(home).to(GROUPED).train() for home in homes]
    for each in models:
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return models


def fused(model):
    """The kernels got the factors of some adapters."""
    return "adapter fused (" in told(model)


def told(model):
    (line,) = (each for each in str(explain(model)).splitlines() if "moe_experts/" in each)
    return line


def assert_same(upstream, model, dtype, **options):
    (expected, gradients), (loss, found) = step(upstream, **options), step(model, **options)
    of_loss, of_gradients = TOLERANCES[dtype]
    close(loss, expected, of_loss)
    assert any("lora_B" in name for name in found)
    assert all(each.abs().max() > 0 for each in gradients.values())
    close(found, gradients, of_gradients)
    return found


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_loss_and_gradients_of_the_adapters_are_upstreams(homes, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    set_choice(f"eager,moe_experts={backend}")
    dtype = GROUPED if backend == "torch" else torch.float32
    upstream, model = (adapted(home).to(dtype) for home in homes)
    found = assert_same(upstream, model, dtype)
    assert len(found) == 2 * 2 * len(WEIGHTS) and all("lora" in name for name in found)
    assert f": {backend} (chosen; adapter fused (down_proj, gate_up_proj)), " in told(model)


@pytest.mark.usefixtures("only_factors")
def test_the_sum_is_never_formed(homes):
    step(adapted(homes[1]).to(GROUPED))
    with pytest.raises(AssertionError, match="the sum was formed"):
        step(adapted(homes[0]).to(GROUPED))


@pytest.mark.parametrize(
    "options",
    [
        {"r": 1, "lora_alpha": 2},
        {"r": 5, "lora_alpha": 3, "use_rslora": True},
        {"r": 4, "rank_pattern": {"mlp.experts.down_proj": 7}, "alpha_pattern": {"mlp.experts.down_proj": 3}},
        {"target_parameters": WEIGHTS[1:]},
        {"target_parameters": WEIGHTS[:1], "target_modules": ["q_proj"]},
    ],
    ids=["rank 1", "rslora", "patterns", "down", "gate_up"],
)
def test_configs(homes, options):
    model = compared(homes, **options)
    assert fused(model)


def test_a_base_in_bfloat16_has_adapters_in_float32(homes):
    models = []
    for home, dtype in [(homes[0], torch.float32), (homes[0], torch.bfloat16), (homes[1], torch.bfloat16)]:
        model = home.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE, torch.bfloat16)
        lora = peft.LoraConfig(r=4, target_modules=[], target_parameters=WEIGHTS)
        models.append(randomised(peft.get_peft_model(model.to(dtype), lora)))
    models[0].load_state_dict(models[1].state_dict())
    models[2].load_state_dict(models[1].state_dict())
    (_, truth), (_, rounded), (_, found) = map(step, models)
    assert {each.dtype for each in found.values()} == {torch.float32} and found.keys() == truth.keys()
    errors = [sum((of[name] - truth[name]).norm() for name in truth) for of in (found, rounded)]
    # Upstream rounds the sum of weight and adapter. Both errors are those of bfloat16, not of an order of sums.
    assert 0 < errors[0] < 1.2 * errors[1]
    assert fused(models[2])


def test_trained_weights_get_their_gradients_too(homes):
    upstream, model = (adapted(home).to(GROUPED).requires_grad_(True) for home in homes)
    found = assert_same(upstream, model, GROUPED)
    assert sum("experts" in name and "lora" not in name for name in found) == 2 * len(WEIGHTS)
    assert fused(model)


ROUTINGS = {
    "skewed": [[0, 1]] * 9 + [[0, 2]],
    "one expert": [[3, 3]] * 10,
    "first and last empty": [[1, 2], [2, 1]] * 5,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_results_and_gradients_of_every_operand(homes, backend, low, routing):
    """The adapters', those of the inputs, and of the routing weights: what a router's gradient begins with."""
    if backend == "triton":
        pytest.importorskip("triton")
    set_choice(f"eager,moe_experts={backend}")
    dtype = BACKENDS[backend].low if low else GROUPED if backend == "torch" else torch.float32
    ids = torch.tensor(ROUTINGS[routing], device=DEVICE)
    x, share, grad = (
        torch.randn(size, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
        for size in ((10, 32), (10, 2), (10, 32))
    )
    sides = []
    for home in homes:
        wrapper = adapted(home).to(dtype).base_model.model.model.layers[0].mlp.experts
        leaves = [each.detach().requires_grad_() for each in (x, share)]
        y = wrapper(leaves[0], ids, leaves[1])
        y.backward(grad)
        sides.append({"y": y.detach(), "x": leaves[0].grad, "weights": leaves[1].grad, **grads_of(wrapper)})
    expected, found = sides
    assert found.keys() == expected.keys() and len(found) == 3 + 2 * len(WEIGHTS)
    assert sum("lora" in name for name in found) == len(found) - 3  # nothing for the frozen weights
    for name, truth in expected.items():
        assert found[name].dtype is truth.dtype
        close(found[name], truth, 4e-2 if dtype is not torch.float32 else 1e-4)


def test_gradients_of_embeddings_and_routers(homes):
    """Through the whole model: what is in front of frozen experts is trained, too."""
    models = [adapted(home, target_modules=["q_proj"]).to(GROUPED) for home in homes]
    for model in models:
        for name, each in model.named_parameters():
            each.requires_grad_("lora" in name or "mlp.gate" in name or "embed" in name)
    found = assert_same(*models, GROUPED)
    assert sum("mlp.gate" in name for name in found) == 2 and any("embed" in name for name in found)
    assert fused(models[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(homes, reentrant):
    upstream, model = checkpointed(homes, reentrant=reentrant)
    assert_same(upstream, model, GROUPED)
    assert fused(model)


def test_adapters_that_a_checkpoint_sees_first(homes, monkeypatch):
    """PEFT was imported after the model: its method is wrapped in the first call, and the call is repeated."""
    wrapped = layer.ParamWrapper._activate_lora
    monkeypatch.setattr(layer.ParamWrapper, "_activate_lora", wrapped.__wrapped__)
    upstream, model = checkpointed(homes)
    assert_same(upstream, model, GROUPED)
    assert layer.ParamWrapper._activate_lora is not wrapped.__wrapped__
    assert_same(upstream, model, GROUPED)
    assert fused(model)


@pytest.mark.parametrize("bound", ["ROWS", "MOST"])
@pytest.mark.parametrize("again", [False, True])
def test_some_tokens_at_a_time(homes, monkeypatch, again, bound):
    """Setting ``memory``: in tiles, with what they compute computed again."""
    pytest.importorskip("triton")
    monkeypatch.setattr(SIZES_OF_KERNELS, "least", True)
    monkeypatch.setattr(tiles, bound, 1)
    monkeypatch.setattr(tiles, "LEAST", 1)
    cut, numbers = tiles._tiles, []
    monkeypatch.setattr(tiles, "_tiles", lambda *call: numbers.append(len(list(cut(*call)))) or cut(*call))
    set_choice("eager,moe_experts=triton")
    upstream, model = checkpointed(homes) if again else (adapted(home).to(GROUPED).train() for home in homes)
    assert_same(upstream, model, GROUPED)
    # Forward and backward of each layer; a checkpoint runs no forward again.
    assert numbers == [numbers[0]] * 4 and numbers[0] > 1


def test_autocast(homes):
    upstream, model = (adapted(home) for home in homes)
    assert_same(upstream, model, torch.bfloat16, context=lambda: torch.autocast(DEVICE, dtype=torch.bfloat16))
    assert fused(model)


def test_several_active_adapters(homes):
    models = []
    for home in homes:
        model = adapted(home)
        other = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=WEIGHTS)
        try:
            model.add_adapter("other", other)
        except ValueError as error:  # before 0.20
            pytest.skip(str(error))
        model.base_model.set_adapter(["default", "other"])
        models.append(randomised(model).to(GROUPED))
    found = assert_same(*models, GROUPED)
    assert sum("lora_A.other" in name for name in found) == 2 * len(WEIGHTS)
    assert fused(models[1])


def test_merged_and_disabled_adapters(homes):
    model = adapted(homes[1]).to(GROUPED).eval()
    ids = torch.arange(12, device=DEVICE).view(1, 12)
    with torch.no_grad():
        before = model(ids).logits
        with model.disable_adapter():
            without = model(ids).logits
        model.merge_adapter()
        close(model(ids).logits, before, TOLERANCES[GROUPED][1])
        model.unmerge_adapter()
        close(model(ids).logits, before, TOLERANCES[GROUPED][1])
        assert (without - before).abs().max() > 0.02 * before.abs().max()
        alone = homes[1].Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(DEVICE, GROUPED).eval()
        alone.load_state_dict(
            {
                name.replace("base_model.model.", "").replace("base_layer.", ""): each
                for name, each in model.state_dict().items()
                if "lora" not in name
            }
        )
        close(without, alone(ids).logits, TOLERANCES[GROUPED][0])
        close(model.merge_and_unload()(ids).logits, before, TOLERANCES[GROUPED][1])


def test_expert_biases_and_transposed_weights(modules):
    homes = modules("gpt_oss")
    upstream, model = (
        adapted(home, GptOssConfig(**GPT_OSS), "GptOssForCausalLM").to(GROUPED) for home in homes
    )
    assert_same(upstream, model, GROUPED)
    assert "adapter fused (down_proj, gate_up_proj)" in told(model)


def test_parameters_and_what_is_saved_are_pefts(homes):
    upstream, model = (adapted(home).to(GROUPED) for home in homes)
    during = []
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    experts.register_forward_pre_hook(lambda module, _: during.append([*module.state_dict()]))
    step(model)
    assert during == [["gate_up_proj", "down_proj"]] and "gate_up_proj" not in vars(experts)
    ours, theirs = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(upstream)
    assert [*ours] == [*theirs] and all(torch.equal(ours[name], theirs[name]) for name in ours)
    copy.deepcopy(model)


def test_weights_are_back_after_an_error(homes):
    model = adapted(homes[1]).to(GROUPED)
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    seen = []

    def fail(module, _):
        seen.append({type(module.gate_up_proj), type(module.down_proj)})
        raise KeyError("on purpose")

    experts.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        step(model)
    assert seen == [{AdaptedWeight}]
    assert type(experts.gate_up_proj) is type(experts.down_proj) is torch.nn.Parameter


@pytest.mark.slow
def test_calls_that_no_kernel_takes_get_the_sum(homes):
    set_choice("auto")
    upstream, model = (adapted(home).to(GROUPED) for home in homes)
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    experts.act_fn = torch.nn.Softplus()
    upstream.base_model.model.model.layers[0].mlp.experts.get_base_layer().act_fn = torch.nn.Softplus()
    assert_same(upstream, model, GROUPED)
    assert "adapter added to the weight, as upstream's code reads it (down_proj, gate_up_proj)" in told(model)


def left(homes):
    model = compared(homes)
    line = told(model)
    assert "fused" not in line and ": torch (chosen" in line
    return line


def test_an_adapter_of_another_formula_is_left_to_peft(homes, monkeypatch):
    upstream = layer.ParamWrapper.get_delta_weight
    monkeypatch.setattr(layer.ParamWrapper, "get_delta_weight", lambda *args: upstream(*args) * 2)
    peft_adapters._is_known.cache_clear()
    try:
        assert "by PEFT: this release of PEFT computes another formula" in left(homes)
    finally:
        peft_adapters._is_known.cache_clear()


def test_a_backend_that_takes_no_adapters_gets_the_sum(homes, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_TAKING", frozenset())
    assert "adapter of down_proj added to the weight by PEFT: torch does not take adapters" in left(homes)


def test_a_subclass_of_tensor_is_left_to_peft(homes, monkeypatch):
    monkeypatch.setattr(peft_adapters, "not_plain", lambda *_: "an operand is a DTensor, not a plain tensor")
    assert "added to the weight by PEFT: an operand is a DTensor" in left(homes)


def test_where_eager_is_chosen_peft_does_it(homes, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_lent", None)
    set_choice("eager")
    model = compared(homes)
    assert told(model).endswith("eager (eager is chosen)")


def test_peft_that_is_imported_after_the_model(homes, monkeypatch):
    kind = layer.ParamWrapper
    monkeypatch.setattr(kind, "_activate_lora", kind._activate_lora.__wrapped__)
    model = adapted(homes[1]).to(GROUPED)
    step(model)
    assert hasattr(kind._activate_lora, "veomni_watched")
    step(model)
    assert fused(model)


def test_a_compiled_model_is_left_to_peft(homes, monkeypatch):
    monkeypatch.setattr(peft_adapters.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(peft_adapters, "_lent", None)
    wrapper = adapted(homes[1]).base_model.model.model.layers[0].mlp.experts
    with wrapper._activate_lora(["default"]):
        assert hasattr(wrapper.get_base_layer(), "parametrizations")
