"""The kernel by flex_attention against the formulas: outputs and every gradient, with all kinds of masks."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.kernels.attention.flexible import on_a_cpu, upstreams_mask
from veomni_hook.kernels.attention import flex, masks, reference

VARIANTS = ("sinks", "sinks_float32_softmax", "sinks_rescaled", "softcap")
LEFT = [[0] * 7 + [1] * 30, [1] * 37]
RIGHT = [[1] * 30 + [0] * 7, [1] * 37]
PACKED = [[*range(20), *range(17)], [*range(5), *range(32)]]
MASKS = {
    "none": None,
    "causal": {},
    "window": {"window": 9},
    "left padding": {"attention_mask": torch.tensor(LEFT)},
    "right padding": {"attention_mask": torch.tensor(RIGHT)},
    "left padding and window": {"attention_mask": torch.tensor(LEFT), "window": 9},
    "packed": {"position_ids": torch.tensor(PACKED)},
    "packed and window": {"position_ids": torch.tensor(PACKED), "window": 9},
}
#: One variant a mask in each dtype: the masks do not hang on the formula. The others are left to the slow tests.
SOON = {
    (VARIANTS[(number + shift) % len(VARIANTS)], kind, dtype)
    for number, kind in enumerate(MASKS)
    for shift, dtype in enumerate((torch.float32, torch.bfloat16))
}
#: (rtol, atol); in bfloat16 the formulas round scores or weights, the kernel does not.
CLOSE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (0.05, 0.05)}


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


class Attention(nn.Module):
    def __init__(self, heads=4, key_heads=2, width=16):
        super().__init__()
        self.num_key_value_groups = heads // key_heads
        self.head_dim = width
        self.sinks = nn.Parameter(torch.randn(heads))

    def operands(self, length, key_heads=2, batch=2, dtype=torch.float32):
        heads = len(self.sinks)
        # As projections make them: the heads are not the outer dimension.
        return [
            torch.randn(batch, length, number, self.head_dim, dtype=dtype).transpose(1, 2).requires_grad_()
            for number in (heads, key_heads, key_heads)
        ]


def results(run, operands, mask, module, *values):
    leaves = [*operands, module.sinks]
    for leaf in leaves:
        leaf.grad = None
    output = run(*operands, mask, module, *values)[0]
    torch.manual_seed(1)
    upward = torch.randn_like(output)
    if mask is not None:
        # No loss counts what padding computes. Upstream lets gradients into scores that it has rounded away.
        upward = upward * (mask == 0).any(-1)[:, 0, :, None, None]
    output.backward(upward)
    return [output.detach(), *(torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves)]


def kernel(variant):
    return flex.with_softcap if variant == "softcap" else flex.with_sinks


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variant", "kind", "dtype"),
    [
        pytest.param(*each, marks=[] if each in SOON else pytest.mark.slow)
        for each in product(VARIANTS, MASKS, CLOSE)
    ],
    ids=str,
)
def test_equals_the_formula(variant, kind, dtype):
    module = Attention().to(dtype)
    operands = module.operands(37, dtype=dtype)
    mask = None if MASKS[kind] is None else upstreams_mask(2, 37, dtype=dtype, **MASKS[kind])
    assert flex.refuses(module, *operands, mask, module, 0.3, 0.0) is None
    values = (0.3, 0.0, 2.0) if variant == "softcap" else (0.3, 0.0)
    expected = results(getattr(reference, variant), operands, mask, module, *values)
    found = results(kernel(variant), operands, mask, module, *values)
    assert kernel(variant)(*operands, mask, module, *values)[1] is None  # the weights are not there
    rtol, atol = CLOSE[dtype]
    for name, one, other in zip(("output", "query", "key", "value", "sinks"), expected, found, strict=True):
        torch.testing.assert_close(
            other, one, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "left padding and window"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_backwards_differentiate_the_formula(variant, kind):
    module = Attention()
    hidden, mixing = torch.randn(2, 4, 37, 16, requires_grad=True), torch.randn(2, 4)
    mask = None if MASKS[kind] is None else upstreams_mask(2, 37, **MASKS[kind])
    upward = torch.randn(2, 37, 4, 16)
    if mask is not None:
        upward = upward * (mask == 0).any(-1)[:, 0, :, None, None]
    values = (0.3, 0.0, 2.0) if variant == "softcap" else (0.3, 0.0)
    leaves = [hidden] if variant == "softcap" else [hidden, module.sinks]

    def derivatives(run):
        query = hidden.sin()  # all operands depend on it
        key, value = (torch.einsum("nh,bhlw->bnlw", mixing, each) for each in (query, query * hidden))
        output = run(query, key, value, mask, module, *values)[0]
        first = torch.autograd.grad((output * upward).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)]

    expected, found = derivatives(getattr(reference, variant)), derivatives(kernel(variant))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("heads", "length"),
    [((6, 2), 2), ((8, 1), 127), ((4, 4), 128), ((6, 2), 129), ((8, 1), 129), ((4, 4), 300)],
    ids=str,
)
def test_any_length_and_any_number_of_groups(length, heads):
    module = Attention(*heads)
    operands = module.operands(length, heads[1], batch=1)
    mask = upstreams_mask(1, length, window=70)
    expected = results(reference.sinks, operands, mask, module, 0.3)
    found = results(flex.with_sinks, operands, mask, module, 0.3)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=5e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("heads", "key_heads", "given"), [(8, 2, 2), (6, 2, 6), (4, 4, 4)])
def test_groups_that_are_no_power_of_two_are_repeated(monkeypatch, heads, key_heads, given):
    module, held, run = Attention(heads, key_heads), [], flex._run

    def noted(kind, operands):
        held.extend(operands)
        return run(kind, operands)

    monkeypatch.setattr(flex, "_run", noted)
    flex.with_sinks(*module.operands(9, key_heads), None, module, 0.3)
    assert [each.shape[1] for each in held[:3]] == [heads, given, given]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("softcap", "scaling", "masked"),
    [(None, None, True), (None, 0.5, False), (3.0, None, False), (3.0, 0.5, True)],
)
def test_softcap_and_scaling_may_be_none(softcap, scaling, masked):
    module = Attention()
    operands = module.operands(37)
    mask = upstreams_mask(2, 37, attention_mask=torch.tensor(LEFT)) if masked else None
    expected = results(reference.softcap, operands, mask, module, scaling, 0.0, softcap)
    found = results(flex.with_softcap, operands, mask, module, scaling, 0.0, softcap)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_more_keys_than_queries():
    module = Attention()
    query, *_ = module.operands(37)
    _, key, value = module.operands(50)
    mask = upstreams_mask(2, 50)[:, :, 13:].contiguous()
    masks._remember(mask)
    assert flex.refuses(module, query, key, value, mask, module, 0.3, 0.0) is None
    expected = results(reference.sinks, [query, key, value], mask, module, 0.3)
    found = results(flex.with_sinks, [query, key, value], mask, module, 0.3)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_autocast_computes_in_its_dtype():
    module = Attention()
    query, key, value = module.operands(37)
    value = value.detach().bfloat16().requires_grad_()
    mask = upstreams_mask(2, 37)
    assert "query, key and value are" in flex.refuses(module, query, key, value, mask, module, 0.3, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex.refuses(module, query, key, value, mask, module, 0.3, 0.0) is None
        expected = results(reference.sinks, [query, key, value], mask, module, 0.3)
        found = results(flex.with_sinks, [query, key, value], mask, module, 0.3)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


REFUSED = {
    "there is one query": lambda call: call(length=1),
    "the attention has dropout (0.1)": lambda call: call(dropout=0.1),
    "a forward hook of the module reads the attention weights": lambda call: call(hook=True),
    "query, key and value are torch.float64": lambda call: call(dtype=torch.float64),
    "head sizes are 24": lambda call: call(width=24),
    "not as transformers made it": lambda call: call(mask=lambda mask: mask.clone()),
    "not as transformers made": lambda call: call(mask=lambda mask: mask[:, :, :, :]),
    "not as transformers": lambda call: call(mask=lambda mask: mask.fill_(0)),
    "the attention mask is a str": lambda call: call(mask=lambda mask: "mask"),
    "the attention mask is (2, 1, 37, 37)": lambda call: call(length=36),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason):
    held = {}

    def call(length=37, dropout=0.0, hook=False, dtype=torch.float32, width=16, mask=None, train=True):
        module = Attention(width=width).train(train)
        if hook:
            module.register_forward_hook(lambda *_: None)
        made = held["mask"] = upstreams_mask(2, 37)
        made = made if mask is None else mask(made)
        return flex.refuses(module, *module.operands(length, dtype=dtype), made, module, 0.3, dropout) or ""

    assert reason in str(REFUSED[reason](call))
    assert call(dropout=0.1, train=False) == ""


def test_refuses_transforms_of_torch_func():
    module = Attention()
    operands, reasons = module.operands(9), []

    def call(number):
        reasons.append(flex.refuses(module, *operands, None, module, 0.3, 0.0))
        return number

    torch.vmap(call)(torch.zeros(2))
    assert reasons == ["a torch.func transform is active"]


def test_refuses_while_torch_compile_is_disabled():
    module = Attention()
    operands = (*module.operands(9), None, module, 0.3, 0.0)
    reason = "torch.compile is disabled, and flex_attention needs it"
    with torch._dynamo.config.patch(disable=True):
        assert flex.refuses(module, *operands) == reason
    with torch.compiler.set_stance("force_eager"):
        assert flex.refuses(module, *operands) == reason
    assert flex.refuses(module, *operands) is None


def test_a_mask_with_too_many_positions(monkeypatch):
    monkeypatch.setattr(flex, "_MOST_POSITIONS", 2 * 37 * 37)
    module, mask = Attention(), upstreams_mask(2, 37)
    reason = flex.refuses(module, *module.operands(37), mask, module, 0.3, 0.0)
    assert reason == "the attention mask has 2738 positions, more than a kernel can count"


def test_auto_leaves_short_calls_and_float32():
    short, long = (Attention().operands(length, dtype=torch.bfloat16)[0] for length in (3, 4))
    assert flex.loses(None, short) == "fewer than 4 queries: not measured to be faster"
    assert flex.loses(None, long) is None
    assert flex.loses(None, long.float()) == "the attention is in float32: not measured to be faster"


def test_compiled_code_is_never_given_up(monkeypatch, caplog):
    """torch's limit of compiled variants raises, and compiling begins anew."""
    made, runs, original = [], [], flex._compiled

    def compiled():
        made.append(original())
        number = len(made)

        def run(*operands):
            runs.append(number)
            if number == 1:
                raise flex._LIMIT_HIT("the limit")
            return made[-1](*operands)

        return run

    monkeypatch.setattr(flex, "_compiled", compiled)
    module = Attention()
    operands = (*module.operands(9), None, None, 0.3, False)
    expected = reference.softcap(*operands[:3], None, module, 0.3)[0].transpose(1, 2)
    for _ in range(2):
        torch.testing.assert_close(flex._run(("kind",), operands)[0], expected, rtol=2e-5, atol=2e-5)
    assert (len(made), runs) == (2, [1, 2, 2])
    assert "limit of compiled variants" in caplog.text


def test_few_variants_are_compiled_for_many_lengths(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(flex, "_BACKEND", backend)
    module = Attention()
    for length in (256, 300, 130, 512, 77, 384, 100):
        operands = module.operands(length, batch=1)
        mask = upstreams_mask(1, length)
        blocks = flex._blocks(mask, operands[0], uniform=False)
        found, lse = flex._run(("kind",), (*operands, blocks.mask, None, 0.3, True))
        expected = reference.softcap(*operands, mask, module, 0.3)[0].transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        assert lse.shape == found.shape[:3]
    assert len(graphs) <= 3


def test_a_hook_of_transformers_counts_while_attentions_are_wanted(monkeypatch):
    from transformers.utils import output_capturing

    module = Attention()
    operands = (*module.operands(9), None, module, 0.3, 0.0)
    output_capturing.install_output_capuring_hook(module, "attentions", 1)
    assert flex.refuses(module, *operands) is None
    for wanted, refused in (({"hidden_states": []}, False), ({"attentions": []}, True)):
        monkeypatch.setattr(output_capturing, "_active_collector", SimpleNamespace(get=lambda: wanted))  # noqa: B023
        assert (flex.refuses(module, *operands) is not None) is refused
