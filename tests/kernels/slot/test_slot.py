import copy
import functools
import gc
import inspect
import logging
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from veomni_hook.errors import KernelError
from veomni_hook.kernels.rms_norm.torch import rms_norm
from veomni_hook.kernels.selection.declaration import Kernel, Op, Requirement, Variant
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.slot import Outcome, Slot


@pytest.fixture
def slot():
    return Slot("rms_norm", "cast_before_weight", "some.module")


@pytest.fixture
def register():
    """Registers kernels for one test."""

    def add(**changes):
        name = {
            "op": "rms_norm",
            "variant": "cast_before_weight",
            "backend": "mine",
            "load": f"{__name__}:answer",
        }
        registry.add(Kernel(**{**name, **changes}))

    with registry.restored():
        yield add


def answer(*_):
    return "mine"


def never(owner, *_):
    return "never"


def norm():
    return Qwen3RMSNorm(8)


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def test_answers_with_the_chosen_kernel(slot):
    owner = norm()
    for choice, kernel, backend in [
        ("auto", rms_norm, "torch"),
        ("eager", None, "eager"),
        ("torch", rms_norm, "torch"),
    ]:
        set_choice(choice)
        assert slot.kernel(owner, X) is kernel
        assert slot.outcome(owner).backend == backend


def test_a_call_of_a_module_is_computed_or_made(slot, register):
    """A kernel gets the module as its last operand; without a kernel, the module is called."""
    owner, module = norm(), nn.Linear(8, 8)
    register(load=f"{__name__}:called_for", refuses=f"{__name__}:unless_linear")
    set_choice("rms_norm=mine")
    assert slot.call(owner, module, X) == ("called for", X.shape, module)
    assert slot.outcome(owner).backend == "mine"
    other = nn.Identity()
    assert slot.call(owner, other, X) is X
    assert slot.outcome(owner) == Outcome("eager", "not a Linear")
    set_choice("eager")
    assert torch.equal(slot.call(owner, module, X), module(X))


def called_for(x, module):
    return "called for", x.shape, module


def unless_linear(owner, x, module):
    return None if isinstance(module, nn.Linear) else "not a Linear"


def test_a_refusal_falls_through_and_is_remembered(slot):
    owner = norm()
    assert slot.kernel(owner, X.double()) is None
    assert "float64" in slot.outcome(owner).reason
    assert slot.kernel(owner, X) is rms_norm
    assert slot.outcome(owner).backend == "torch"


def test_is_silent_when_deactivated(slot):
    set_active(False)
    assert slot.kernel(norm(), X) is None
    set_active(True)
    assert slot.kernel(norm(), X) is rms_norm


def test_asks_candidates_in_turn(slot, register):
    register(priority=1, refuses=f"{__name__}:never")
    assert slot.kernel(norm(), X) is rms_norm
    register(backend="best", priority=2)
    assert slot.kernel(norm(), X) is answer


def test_losing_counts_under_auto_only(slot, register):
    register(priority=1, loses=f"{__name__}:never")
    assert slot.kernel(norm(), X) is rms_norm
    set_choice("rms_norm=mine")
    assert slot.kernel(norm(), X) is answer


def test_a_name_that_cannot_run_here_is_an_error(slot, register):
    register(requires=Requirement(("npu",)))
    set_choice("rms_norm=mine")
    with pytest.raises(KernelError, match="found cpu"):
        slot.kernel(norm(), X)


def test_unknown_names_are_errors():
    with pytest.raises(KernelError):
        Slot("rms_norm", "standard", "some.module")


@pytest.mark.parametrize("x", [torch.empty(2, 8, device="meta"), object(), None])
def test_operands_that_are_no_values(slot, x):
    assert slot.kernel(norm(), x) is None


def test_holds_no_module_alive(slot):
    owner = norm()
    slot.kernel(owner, X)
    assert len(slot.records) == 1
    del owner
    gc.collect()
    assert not slot.records


def test_leaves_no_trace_in_the_module(slot):
    owner = norm()
    before = dict(vars(owner))
    slot.kernel(owner, X)
    assert dict(vars(owner)) == before


def test_is_rebuilt_when_pickled(slot):
    slot.kernel(norm(), X)
    assert repr(pickle.loads(pickle.dumps(slot))) == repr(slot)


def test_a_refusal_is_a_warning_where_the_backend_was_named(slot, caplog):
    with caplog.at_level(logging.INFO, "veomni_hook.kernels"):
        for choice in ("auto", "torch"):
            set_choice(choice)
            for _ in range(2):
                slot.kernel(norm(), X.double())
    refused = [record for record in caplog.records if "runs instead of torch" in record.getMessage()]
    assert [record.levelname for record in refused] == ["INFO", "WARNING"]


def test_says_once_what_it_picked(slot, caplog):
    with caplog.at_level(logging.INFO, "veomni_hook.kernels"):
        for _ in range(3):
            slot.kernel(norm(), X)
            set_choice("auto")
    assert [record.getMessage() for record in caplog.records] == [
        "some.module: rms_norm/cast_before_weight on cpu: torch (auto)"
    ]


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x):
        if (kernel := SLOT.kernel(self, x)) is not None:
            return kernel(x, self.weight, 1e-6)
        return x * self.weight


SLOT = Slot("rms_norm", "cast_before_weight", __name__)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_auto_compiles_the_upstream_code_without_a_graph_break(backend):
    model = Guarded()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), X * model.weight)
    assert not torch.equal(model(X), X * model.weight)


def test_is_exported_as_the_upstream_code():
    model = Guarded()
    exported = torch.export.export(model, (X,))
    assert torch.equal(exported.module()(X), X * model.weight)


def test_says_why_no_kernel_comes_into_question(slot, caplog):
    owner = norm()
    with caplog.at_level(logging.INFO, "veomni_hook.kernels"):
        for choice, reason in [
            ("eager", "eager is chosen"),
            ("rms_norm=reference", None),
        ]:
            set_choice(choice)
            slot.kernel(owner, X)
            outcome = slot.outcome(owner)
            assert (outcome.backend == "eager") is (reason is not None)
            assert reason in (None, outcome.reason)
        set_active(False)
        assert slot.outcome(owner) == ("eager", "veomni_hook is deactivated")
    assert [record.getMessage() for record in caplog.records] == [
        "some.module: rms_norm/cast_before_weight: upstream's code runs: eager is chosen",
        "some.module: rms_norm/cast_before_weight on cpu: reference (reference)",
    ]


def test_the_reference_is_what_a_choice_by_name_gets(slot):
    set_choice("reference")
    kernel = slot.kernel(norm(), X)
    assert kernel is load_attribute(registry.ops()["rms_norm"].variants["cast_before_weight"].reference)


# A toy op: out = a + b * scale


def plain(a, b, scale=2):
    return a + b * scale


def fast(a, b, scale):
    return ("fast", a, b, scale)


def refuses_zero_scale(owner, a, b, scale, upstream):
    ASKED.append((owner, upstream))
    return "the scale is 0" if scale == 0 else None


ASKED = []


def declare_toy(**fields):
    variants = {name: Variant("a + b * scale", f"{__name__}:plain") for name in ("scaled", "bare")}
    registry.add_op(Op("toy", variants, **fields))


@pytest.fixture
def toy():
    with registry.restored():
        declare_toy()
        registry.add(
            Kernel("toy", "scaled", "quick", f"{__name__}:fast", refuses=f"{__name__}:refuses_zero_scale")
        )
        ASKED.clear()
        yield


def upstream(x, y, ids=None, scale=3):
    return ("upstream", x, y, ids, scale)


class TestYields:
    @pytest.fixture
    def chosen(self):
        with registry.restored():
            declare_toy(yields=f"{__name__}:flagged")
            registry.add(
                Kernel("toy", "bare", "grouped", f"{__name__}:fast", refuses=f"{__name__}:takes_index_one")
            )
            yield Slot("toy", "bare", __name__)

    def test_what_the_user_chose_upstream_wins_over_auto(self, chosen):
        owner, other = norm(), norm()
        owner.flag = True
        assert chosen.kernel(owner, X, 1, 2) is None
        assert chosen.outcome(owner) == Outcome("eager", "it is flagged")
        assert chosen.kernel(other, X, 1, 2) is fast

    def test_a_kernel_by_name_wins_over_it(self, chosen):
        owner = norm()
        owner.flag = True
        set_choice("toy=grouped")
        assert chosen.kernel(owner, X, 1, 2) is fast
        assert chosen.kernel(owner, X, 2, 2) is None


def flagged(owner, x, index, weights):
    return "it is flagged" if hasattr(owner, "flag") else None


@pytest.mark.usefixtures("toy")
class TestAt:
    parameters = "x->a, y->b, ids=None, scale=3"

    @pytest.fixture
    def slot(self):
        return Slot("toy", "scaled", __name__, self.parameters)

    def test_a_kernel_gets_the_operands_and_refusals_upstream_last(self, slot):
        owner = norm()
        called = slot.at(owner, upstream)(X, y=1, ids=7)
        assert called == ("fast", X, 1, 3)
        assert ASKED == [(owner, upstream)]
        assert slot.outcome(owner).backend == "quick"

    def test_a_refused_call_is_upstreams_with_the_very_same_arguments(self, slot):
        owner = norm()
        assert slot.at(owner, upstream)(X, 1, scale=0) == ("upstream", X, 1, None, 0)
        assert slot.outcome(owner) == ("eager", "the scale is 0")

    def test_arguments_that_do_not_fit_are_upstreams_error(self, slot):
        with pytest.raises(TypeError, match=r"upstream\(\) missing 1 required positional argument"):
            slot.at(norm(), upstream)(X)
        assert slot.at(norm(), lambda *call: call)(X, 1, 2, 3, 4) == (X, 1, 2, 3, 4)

    def test_keywords_named_like_its_own_arguments(self):
        slot = Slot("toy", "scaled", __name__, "self->a, owner->b, scale=1")
        called = slot.at(norm(), lambda **call: call)(self=X, owner=1)
        assert called == ("fast", X, 1, 1)

    def test_a_function_that_was_put_in_upstreams_place_runs(self, slot):
        owner = norm()
        other = types.FunctionType(upstream.__code__, {"__name__": "patching.library"})
        assert slot.at(owner, other) is other
        assert slot.outcome(owner) == ("replaced", "replaced by patching.library.upstream")
        assert slot.at(owner, functools.wraps(upstream)(other)) is not upstream

    @pytest.mark.parametrize("reason", ["eager", "inactive", "bare", "other"])
    def test_is_upstream_itself_where_nothing_comes_into_question(self, slot, reason):
        if reason == "eager":
            set_choice("eager")
        elif reason == "inactive":
            set_active(False)
        elif reason == "bare":
            slot = Slot("toy", "bare", __name__)
        else:
            set_choice("torch")
        assert slot.at(norm(), upstream) is upstream

    def test_a_reference_by_name_is_called_by_its_own_parameters(self):
        set_choice("toy=reference")
        assert Slot("toy", "bare", __name__).at(norm(), upstream)(X, 1).equal(X + 2)
        assert Slot("toy", "bare", __name__, "b, a").at(norm(), upstream)(1, X).equal(X + 2)

    def test_a_device_is_found_in_a_list_of_tensors(self, slot):
        assert slot.at(norm(), upstream)([X, X], 1)[0] == "fast"
        assert slot.at(norm(), upstream)([X.to("meta")], 1)[0] == "upstream"
        assert slot.at(norm(), upstream)([], 1)[0] == "upstream"

    @pytest.mark.parametrize("choice", ["toy=quick", "quick"])
    def test_a_backend_without_this_variant_is_an_error_that_names_the_site(self, choice):
        set_choice(choice)
        slot = Slot("toy", "bare", __name__)
        for _ in range(2):
            with pytest.raises(KernelError, match="toy/bare has no 'quick' kernel") as caught:
                slot.at(norm(), upstream)(X, 1)
            assert caught.value.where.startswith(f"{__name__}, kernels={choice}, on cpu")

    def test_an_op_that_a_preset_does_not_list_runs_the_upstream_code(self, slot):
        set_choice("torch")
        assert slot.at(norm(), upstream) is upstream
        assert slot.outcome(norm()) == ("eager", "torch is chosen and has no kernels for toy")

    def test_pickles_with_its_parameters(self, slot):
        copy = pickle.loads(pickle.dumps(slot))
        assert (repr(copy), copy.parameters) == (repr(slot), self.parameters)


class Attention(nn.Module):
    def forward(self, x):
        return ROTARY.at(self, tensor_upstream)(x, x)


def tensor_upstream(x, y, ids=None, scale=3):
    return x + y * scale


def covering(cls):
    """Wraps forward as a class decorator of upstream does; what it computes is another thing."""
    original = cls.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return ("covered", original(self, *args, **kwargs))

    cls.forward = forward
    return cls


def taking(self, x, index=1, weights=2):
    return x, index, weights


def experts_class(slot):
    @slot.reached(taking)
    @covering
    class Experts(nn.Module):
        def forward(self, x, index=1, weights=2):
            """Docs."""
            if (kernel := slot.kernel(self, x, index, weights)) is not None:
                return kernel(x, index, weights)
            return x

    return Experts


def takes_index_one(owner, x, index, weights):
    return None if index == 1 else "the index is not 1"


@pytest.fixture
def experts(toy):
    registry.add(Kernel("toy", "bare", "grouped", f"{__name__}:fast", refuses=f"{__name__}:takes_index_one"))
    return experts_class(Slot("toy", "bare", __name__))


class TestReached:
    def test_a_call_that_a_kernel_takes_reaches_the_guard(self, experts):
        owner = experts()
        assert owner(X) == ("fast", X, 1, 2)
        assert owner(X, weights=5) == ("fast", X, 1, 5)

    def test_every_other_call_goes_to_the_covering_forward(self, experts):
        owner = experts()
        assert owner(X, 3) == ("covered", X)
        set_choice("eager")
        assert owner(X) == ("covered", X)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            owner()

    def test_the_guard_is_asked_once_with_its_own_operands(self, toy):
        registry.add(Kernel("toy", "bare", "own", f"{__name__}:fast", refuses=f"{__name__}:second_is_tensor"))
        slot = Slot("toy", "bare", __name__)
        assert experts_class(slot)()(X, weights=X) == ("covered", X)
        # Once on the way in; once more where the covering forward comes back to the guard.
        assert [len(asked) for asked in ASKED] == [3, 3]
        assert ASKED[0][0] is X and ASKED[0][1] == 1 and ASKED[0][2] is X

    def test_a_taken_call_asks_once(self, toy):
        registry.add(Kernel("toy", "bare", "own", f"{__name__}:fast", refuses=f"{__name__}:remembers"))
        assert experts_class(Slot("toy", "bare", __name__))()(X) == ("fast", X, 1, 2)
        assert len(ASKED) == 1

    def test_the_wrapper_may_come_back_to_the_guard(self, experts):
        owner = experts()
        inner = type(owner).forward.__wrapped__.__wrapped__
        assert owner(X, 3) == ("covered", X)
        assert inner(owner, X, 3) is X
        assert inner(owner, X) == ("fast", X, 1, 2)

    def test_a_refused_call_inside_another_of_the_same_class(self, toy):
        registry.add(Kernel("toy", "bare", "own", f"{__name__}:inner", refuses=f"{__name__}:takes_index_one"))
        global INNER
        outer, INNER = (experts_class(Slot("toy", "bare", __name__))() for _ in range(2))
        assert outer(X) == ("covered", X)
        INNER = type(outer)()
        assert outer(X) == ("covered", X)

    def test_what_a_kernel_raises_is_not_taken_for_a_refusal(self, toy):
        registry.add(Kernel("toy", "bare", "own", f"{__name__}:failing"))
        owner = experts_class(Slot("toy", "bare", __name__))()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                owner(X)

    def test_threads_do_not_answer_for_each_other(self, experts):
        owner = experts()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda index: owner(X, index), [1, 3] * 50))
        assert found == [("fast", X, 1, 2), ("covered", X)] * 50

    def test_looks_like_the_forward_that_it_covers(self, experts):
        assert inspect.signature(experts.forward) == inspect.signature(inspect.unwrap(experts.forward))
        assert experts.forward.__doc__ == "Docs."
        assert "slot.kernel" in inspect.getsource(experts.forward)
        assert experts.forward.__wrapped__.__wrapped__ is inspect.unwrap(experts.forward)

    def test_a_class_that_nothing_covers_is_left_alone(self, toy):
        class Experts(nn.Module):
            def forward(self, x):
                return x

        forward = Experts.forward
        assert Slot("toy", "bare", __name__).reached(taking)(Experts) is Experts
        assert Experts.forward is forward

        class Inheriting(experts_class(Slot("toy", "bare", __name__))):
            pass

        assert Slot("toy", "bare", __name__).reached(taking)(Inheriting) is Inheriting
        assert "forward" not in vars(Inheriting)

    def test_copies_and_pickles_as_an_ordinary_class(self, experts):
        assert copy.deepcopy(experts())(X) == ("fast", X, 1, 2)


def remembers(owner, *operands):
    ASKED.append(operands)


INNER = None


def inner(x, index, weights):
    return INNER(x, 3)


def failing(*operands):
    return 1 / 0


def second_is_tensor(owner, *operands):
    ASKED.append(operands)
    return "no"


@pytest.mark.usefixtures("toy")
class TestCompiled:
    def test_at_is_upstream_without_a_graph_break(self):
        global ROTARY
        ROTARY = Slot("toy", "scaled", __name__, "x->a, y->b, ids=None, scale=3")
        model = Attention()
        assert model(X)[0] == "fast"
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for choice in ("auto", "eager", "toy=quick"):
            set_choice(choice)
            assert torch.equal(compiled(X), X * 4)
        assert torch.equal(torch.export.export(model, (X,)).module()(X), X * 4)

    def test_reached_is_the_kernel_or_the_covering_forward_without_a_graph_break(self, toy):
        experts = experts_class(Slot("toy", "bare", __name__))
        compiled = torch.compile(experts(), backend="eager", fullgraph=True)
        label, result = compiled(X)
        assert label == "covered" and torch.equal(result, X)
        refuses = f"{__name__}:takes_index_one"
        registry.add(Kernel("toy", "bare", "grouped", f"{__name__}:fast", refuses=refuses, traceable=True))
        set_choice("toy=grouped")
        assert compiled(X) == ("fast", X, 1, 2) and compiled(X, weights=5) == ("fast", X, 1, 5)
        assert compiled(X, 3)[0] == "covered"


ROTARY = None
