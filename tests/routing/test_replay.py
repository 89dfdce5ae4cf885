"""Recorded and replayed routes: the same bits, and upstream's gradients at given experts."""

import importlib
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Ernie4_5_MoeConfig

from tests.kernels.patched_qwen3 import batch, load
from tests.routing.models import FAMILIES, grads, made, steps
from tests.veomni.configurations import CONFIGURATIONS
from veomni_hook import Kernel, register_kernel
from veomni_hook.errors import KernelError, RoutingError
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.routing import Routes, monitor, record, replay, routers


def assert_equal(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert not [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]


@pytest.mark.parametrize("choice", ["eager", "moe_router=torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_has_the_bits_of_what_was_recorded(family, choice, folder):
    """Of the loss and every gradient; recording changes none."""
    set_choice(choice)
    model, inputs = made(family, folder), batch()
    plain = steps(model, inputs)
    with record(model, weights=True) as routes:
        recorded = steps(model, inputs)
    assert_equal(plain, recorded)
    with record(model, weights=True) as again, replay(model, pickle.loads(pickle.dumps(routes)).to("cpu")):
        assert_equal(recorded, steps(model, inputs))
    for name, (call,) in routes.calls.items():
        assert call.ids.dtype is torch.uint8 and call.ids.shape == (24, 3)
        assert not call.weights.requires_grad and call.weights.shape == (24, 3)
        assert torch.equal(again[name], routes[name])
        assert torch.equal(again.calls[name][0].weights, call.weights)


def at_recorded(monkeypatch, routes, experts):
    """Let upstream's own routers choose what was recorded: `torch.topk` is theirs."""
    topk, left = torch.topk, iter([call.ids.long() for calls in routes.calls.values() for call in calls])

    def chosen(scores, k, *args, **kwargs):
        if scores.shape[-1] != experts or k != 3:
            return topk(scores, k, *args, **kwargs)
        ids = next(left)
        return scores.gather(-1, ids), ids

    monkeypatch.setattr(torch, "topk", chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_get_upstreams_weights_and_gradients(family, dtype, folder, monkeypatch):
    """Routers that changed since: their weights are new, their choice is the old one."""
    set_choice("eager")
    model, inputs = made(family, folder).to(dtype), batch()
    upstream = importlib.import_module(type(model).__module__.removesuffix("_with_slots"))
    with record(model) as routes, torch.no_grad():
        model(**inputs)
    (call, *_), *_ = routes.calls.values()
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    oracle = getattr(upstream, type(model).__name__)(model.config).to(dtype).train()
    oracle.load_state_dict(model.state_dict())
    free = steps(model, inputs)
    with replay(model, routes):
        replayed = steps(model, inputs)
    assert not torch.equal(free[0], replayed[0])
    routers = [name for name in replayed[1] if name.endswith(("gate.weight", "router.weight"))]
    assert routers and all(replayed[1][name].abs().max() > 0 for name in routers)
    at_recorded(monkeypatch, routes, call.experts)
    assert_equal(steps(oracle, inputs), replayed)


def two_batches(model, routes, order, *, inside):
    """Two forward passes, then their backward passes in ``order``, in the block of the replay or behind it."""
    inputs = [{name: each[part : part + 1] for name, each in BATCH.items()} for part in (0, 1)]
    model.zero_grad()
    with replay(model, routes):
        losses = [model(**each, use_cache=False).loss for each in inputs]
        for part in order if inside else ():
            losses[part].backward()
    with torch.no_grad():
        model(**inputs[1])  # another forward pass in between, which chooses by itself
    for part in () if inside else order:
        losses[part].backward()
    return torch.stack([loss.detach() for loss in losses]), grads(model)


torch.manual_seed(1)
BATCH = batch()


ORDERS = [
    pytest.param(order, inside, frozen, marks=[] if quick else pytest.mark.slow)
    for order in ((0, 1), (1, 0))
    for inside in (True, False)
    for frozen in (False, True)
    for quick in [
        (order, inside, frozen) in {((0, 1), True, False), ((1, 0), False, False), ((0, 1), False, True)}
    ]
]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize(("order", "inside", "frozen"), ORDERS)
def test_a_checkpoint_repeats_the_call_that_it_repeats(order, inside, reentrant, frozen, folder):
    """Whichever of two batches goes back first, in the block or behind it."""
    model = made("qwen3_moe", folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "gate.weight" in name))
    other = made("qwen3_moe", folder)
    torch.nn.init.normal_(other.model.layers[0].mlp.gate.weight)
    torch.nn.init.normal_(other.model.layers[1].mlp.gate.weight)
    with record(other) as routes:  # experts that the model itself would not choose
        for part in (0, 1):
            other(input_ids=BATCH["input_ids"][part : part + 1])
    expected = two_batches(model, routes, (0, 1), inside=True)
    model.model.embed_tokens.weight.requires_grad_()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = two_batches(model, routes, order, inside=inside)
    assert torch.equal(found[0], expected[0])
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)
    # What follows chooses by itself again, checkpoints included.
    free = steps(model, BATCH)
    model.gradient_checkpointing_disable()
    again = steps(model, BATCH)
    assert torch.equal(free[0], again[0])
    for name, grad in again[1].items():
        torch.testing.assert_close(free[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_nothing_is_left_behind(folder):
    """When the graph is gone, routers are asked as before."""
    model = made("qwen3_moe", folder)
    slot = type(model.model.layers[0].mlp.gate).forward.__globals__["veomni_moe_router_softmax_topk"]
    with record(model) as routes:
        model(**BATCH)
        assert slot.around is not None
    assert slot.around is None
    with replay(model, routes):
        loss = model(**BATCH).loss
    assert slot.around is not None
    loss.backward()
    del loss
    model(**BATCH)
    assert slot.around is None


def test_checkpoints_by_hand_are_recorded_once(folder):
    model = made("qwen3_moe", folder)
    with record(model) as routes:
        logits = checkpoint(lambda: model(**BATCH).logits, use_reentrant=False)
        logits.sum().backward()
    assert [len(calls) for calls in routes.calls.values()] == [1, 1]


def test_compiled_models_are_recorded_and_replayed(folder):
    """The graph breaks at routers, and compiled code of before and after has none of it."""
    model = made("qwen3_moe", folder, num_hidden_layers=1)
    gate = model.model.layers[0].mlp.gate
    compiled = torch.compile(gate, backend="eager")
    hidden = torch.randn(5, 32)
    before = compiled(hidden)
    with record(gate) as routes:
        recorded = compiled(hidden)
    given = Routes({"": (routes[""].long() + 1) % 8}, 8)
    with replay(gate, given):
        replayed = compiled(hidden)
    assert torch.equal(recorded[2], before[2]) and torch.equal(routes[""].long(), before[2])
    assert torch.equal(replayed[2], given[""].long())
    del replayed, recorded
    compiled(hidden)  # the graph is gone: the last call that is looked at
    assert torch.equal(compiled(hidden)[1], before[1])


def test_routes_are_cut_and_joined_by_tokens(folder):
    model = made("qwen3_moe", folder)
    with record(model) as whole:
        steps(model, BATCH)
    halves = [whole.rows(0, 12), whole.rows(12, 24)]
    for part, routes in enumerate(halves):
        with replay(model, routes):
            model(input_ids=BATCH["input_ids"][part : part + 1])
    joined = Routes.joined(halves)
    for name in whole.calls:
        assert torch.equal(joined[name], whole[name])
    assert whole.nbytes == 2 * 24 * 3 and repr(whole) == "Routes(2 routers, calls of each: 1, 144 bytes)"
    assert Routes({"a": torch.arange(512).view(1, 512)}, 512)["a"].dtype is torch.int16


def test_a_rollout_is_replayed_over_its_whole_sequences(folder):
    """Prompts padded on the left, then one call for each token; the last sampled token has no route."""
    set_choice("eager")
    model = made("qwen3_moe", folder).eval()
    prompts, mask = BATCH["input_ids"], torch.ones_like(BATCH["input_ids"])
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with record(model, weights=True) as routes:
        sequences = model.generate(prompts, attention_mask=mask, **options)
    rollout = routes.as_sequences(2)
    assert [len(calls) for calls in routes.calls.values()] == [4, 4]
    inputs, mask = sequences[:, :-1], torch.cat([mask, mask.new_ones(2, 3)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with record(model, weights=True) as again, replay(model, rollout), torch.no_grad():
        model(inputs, attention_mask=mask, position_ids=positions, use_cache=False)
    with record(model, weights=True) as free, torch.no_grad():
        model(inputs, attention_mask=mask, position_ids=positions, use_cache=False)
    for name in rollout:
        assert rollout[name].shape == (2 * 15, 3)
        assert torch.equal(again[name], rollout[name]) and torch.equal(free[name], rollout[name])
        torch.testing.assert_close(free.calls[name][0].weights, rollout.calls[name][0].weights)


def test_names_of_routes():
    routes = Routes({"a": torch.tensor([[0, 1]]), "b": torch.tensor([[1, 2]])}, 4)
    assert list(routes) == list(routes.keys()) == ["a", "b"] and "a" in routes and "c" not in routes
    assert {name: each.tolist() for name, each in dict(routes).items()} == {"a": [[0, 1]], "b": [[1, 2]]}


def replayed(model, routes, *batches):
    with replay(model, routes):
        for each in batches:
            model(**each)


def rolled_out(model, _):
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with record(model.eval()) as calls:
        sequences = model.generate(BATCH["input_ids"], **options)
    replayed(model, calls, {"input_ids": sequences})


def replaced(model, _):
    model.model.layers[1].mlp.gate.forward = lambda hidden: (hidden, hidden, hidden)
    with record(model):
        model.model.layers[0].mlp(torch.randn(1, 3, 32))


def cut(routes, experts=8, width=3, calls=1):
    return Routes({name: [routes[name][:, :width]] * calls for name in routes.calls}, experts)


def unequal(routes):
    return Routes({name: [routes[name], routes[name][:2]] for name in routes}, 8)


GATE = "model.layers.0.mlp.gate"
#: What is done, and what the error says.
FAILS = {
    "other tokens": (
        lambda model, routes: replayed(model, routes, {"input_ids": BATCH["input_ids"][:, :5]}),
        "for 24 tokens, but the router chooses 3 of 8 for 10",
    ),
    "another top k": (lambda model, routes: replayed(model, cut(routes, width=2), BATCH), "are 2 of 8 experts"),
    "more experts": (lambda model, routes: replayed(model, cut(routes, 9), BATCH), "3 of 9 experts"),
    "twice": (
        lambda model, routes: replayed(model, routes, BATCH, BATCH),
        "for the 2. time, but 1 call of it was recorded",
    ),
    "never": (replayed, "2 routers did not ask"),
    "half": (
        lambda model, routes: replayed(model, cut(routes, calls=2), BATCH),
        r"(?s)recorded calls of 2 routers were not replayed.*as_sequences\(batch\)",
    ),
    "a rollout": (rolled_out, r"Routes\.as_sequences\(batch\) makes one call"),
    "a rollout by name": (lambda _, routes: cut(routes, calls=2)[GATE], r"as_sequences\(batch\) makes one call"),
    "another number of sequences": (
        lambda _, routes: unequal(routes).as_sequences(3),
        "had 24? tokens: not the same number for each of 3",
    ),
    "no sequences": (lambda _, routes: routes.as_sequences(0), "not the same number for each of 0"),
    "rollouts of different models": (
        lambda *_: Routes({GATE: [torch.tensor([[0, 1]]), torch.tensor([[0, 1, 2]])]}, 8).as_sequences(1),
        "differ in the number of experts",
    ),
    "other names": (
        lambda model, routes: replayed(model.model, routes),
        "no recognised router model.layers.0.mlp.gate",
    ),
    "replaced": (replaced, "model.layers.1.mlp.gate"),
    "wrong numbers": (lambda *_: Routes({GATE: torch.tensor([[0, 8]])}, 8), "numbers outside of 0 to 7"),
    "doubled numbers": (lambda *_: Routes({GATE: torch.tensor([[5, 1, 5]])}, 8), "an expert twice for one token"),
    "unpatched": (lambda *_: record(torch.nn.Linear(2, 2)).__enter__(), "has no kernel slots"),
}  # fmt: skip


@pytest.mark.parametrize(("act", "said"), FAILS.values(), ids=FAILS)
def test_what_does_not_fit_is_an_error(act, said, folder):
    model = made("qwen3_moe", folder)
    with record(model) as routes:
        model(**BATCH)
    with pytest.raises((RoutingError, KernelError), match=said):
        act(model, routes)


def test_routers_that_are_not_recognised_are_named(folder):
    module = load(folder, "transformers.models.ernie4_5_moe.modeling_ernie4_5_moe")
    sizes = {**FAMILIES["qwen3_moe"][1], "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
    model = module.Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes))
    with pytest.raises(RoutingError, match=r"is not recognised: model\.layers\.0\.mlp"), record(model):
        pass
    with pytest.raises(RoutingError, match="has no recognised router"), record(model, leave=["*.mlp*"]):
        pass


def test_routers_that_look_experts_up_by_tokens_are_left_to_themselves(folder, monkeypatch):
    home = "transformers.models.deepseek_v4"
    config = pytest.importorskip(f"{home}.configuration_deepseek_v4").DeepseekV4Config
    module = load(folder, f"{home}.modeling_deepseek_v4")
    torch.manual_seed(0)
    model = module.DeepseekV4ForCausalLM(config(**CONFIGURATIONS["deepseek_v4"][2])).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    gates = ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    with record(model) as routes, monitor(model) as load_of:
        expected = steps(model, BATCH)
    assert [*routes] == gates == [*load_of.summary()]
    other = Routes({name: (routes[name] + 1) % 4 for name in routes}, 4)
    for given, same in ((routes, True), (other, False)):
        with replay(model, given):
            found = steps(model, BATCH)
        assert torch.equal(found[0], expected[0]) is same
        assert all(torch.equal(found[1][name], each) for name, each in expected[1].items()) is same
    # One that chooses beside its table is not recognised.
    monkeypatch.setattr(routers, "_CHOICES", frozenset({"gather"}))
    with pytest.raises(RoutingError, match=r"is not recognised: model\.layers\.0\.mlp"), record(model):
        pass


def test_a_kernel_of_another_package_must_take_experts(folder):
    model = made("qwen3_moe", folder)
    with registry.restored():
        register_kernel(Kernel("moe_router", "softmax_topk", "theirs", f"{__name__}:theirs"))
        with record(model) as routes:
            model(**BATCH)
        set_choice("moe_router=theirs")
        with pytest.raises(KernelError, match="no operand indices"), replay(model, routes):
            model(**BATCH)


def theirs(router_logits, top_k, normalise):
    weights, indices = torch.topk(router_logits.float().softmax(-1), top_k)
    return weights / weights.sum(-1, keepdim=True), indices
