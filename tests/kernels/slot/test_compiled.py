import logging

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from veomni_hook.errors import KernelError
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.selection.binding import use_kernels
from veomni_hook.kernels.selection.declaration import Kernel, Op, Requirement, Variant
from veomni_hook.kernels.selection.process_choice import STATE, set_active, set_choice
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.slot import Slot

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def plain(x, factor=1):
    return x * factor


def thrice(x, factor):
    return x * 3


def takes_floats(owner, x, *_):
    return None if x.is_floating_point() else "it is no float"


def takes_none_of_this_length(owner, x, *_):
    return f"it has {x.shape[0]} rows"


@pytest.fixture
def toy():
    """An op with a traceable kernel, one that is not, and one for which there is never a place."""
    with registry.restored():
        kernel = declare_toy()
        STATE.changed()  # with the new op among the choices, whatever earlier tests have chosen
        yield kernel


def declare_toy():
    registry.add_op(Op("toy", {"scaled": Variant("x * factor", f"{__name__}:plain")}))
    kernel = {
        "op": "toy",
        "variant": "scaled",
        "load": f"{__name__}:thrice",
        "refuses": f"{__name__}:takes_floats",
    }
    registry.add(Kernel(**kernel, backend="quick", traceable=True))
    registry.add(Kernel(**kernel, backend="opaque"))
    registry.add(Kernel(**kernel, backend="elsewhere", requires=Requirement(("npu",)), traceable=True))
    torch._dynamo.reset()
    return kernel


class Guarded(nn.Module):
    """Asks a slot with a guard."""

    def __init__(self):
        super().__init__()
        self.slot = Slot("toy", "scaled", __name__)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if (kernel := self.slot.kernel(self, x, 1)) is not None:
            return kernel(x, 1) * self.weight
        return x * self.weight


def factored(x, factor=1):
    return x * factor


class Calling(Guarded):
    """Asks a slot at a call."""

    def __init__(self):
        super().__init__()
        self.slot = Slot("toy", "scaled", __name__, "x, factor=1")

    def forward(self, x):
        return self.slot.at(self, factored)(x, factor=1) * self.weight


def compiled(model):
    counter = torch._dynamo.testing.CompileCounter()
    return torch.compile(model, backend=counter, fullgraph=True), counter


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("kind", [Guarded, Calling])
class TestChoice:
    def test_auto_leaves_it_to_inductor(self, kind):
        run, _ = compiled(kind())
        assert torch.equal(run(X), X)

    def test_a_traceable_kernel_by_name_is_compiled(self, kind):
        set_choice("toy=quick")
        run, _ = compiled(kind())
        assert torch.equal(run(X), X * 3)

    def test_a_refusal_compiles_the_upstream_code(self, kind):
        set_choice("toy=quick")
        run, _ = compiled(kind())
        integers = torch.arange(16).reshape(2, 8)
        assert torch.equal(run(integers), integers)

    def test_a_kernel_that_is_not_traceable_is_said(self, kind, caplog):
        set_choice("toy=opaque")
        run, _ = compiled(kind())
        with caplog.at_level(logging.WARNING, "veomni_hook.kernels"):
            assert torch.equal(run(X), X)
        assert "upstream's code runs under torch.compile, because opaque is not traceable" in caplog.text

    def test_a_kernel_that_cannot_run_is_an_error(self, kind):
        set_choice("toy=elsewhere")
        run, _ = compiled(kind())
        # Dynamo wraps what is raised while it traces; the text is ours.
        with pytest.raises(Exception, match="needs a device of type npu") as caught:
            run(X)
        assert "KernelError" in str(caught.value)

    def test_every_choice_is_compiled_once(self, kind):
        model = kind()
        run, counter = compiled(model)
        seen = []
        for _ in range(2):
            for choice, factor in (("auto", 1), ("toy=quick", 3), ("rms_norm=eager", 1), ("eager", 1)):
                set_choice(choice)
                assert torch.equal(run(X), X * factor)
                seen.append(counter.frame_count)
        # What is said of another op changes nothing.
        assert seen == [1, 2, 2, 3, 3, 3, 3, 3]

    def test_what_is_bound_later_is_compiled_anew_and_once(self, kind):
        model = nn.Sequential(kind(), kind())
        run, counter = compiled(model)
        assert torch.equal(run(X), X)
        bind(model[0], toy="quick")
        for _ in range(3):
            assert torch.equal(run(X), X * 3)
        bind(model[0], toy="eager")
        for _ in range(3):
            assert torch.equal(run(X), X)
        assert counter.frame_count == 3
        with use_kernels(toy="quick"):
            assert torch.equal(run(X), X * 3)

    def test_deactivated_it_is_the_upstream_code(self, kind):
        model = kind()
        bind(model, toy="quick")
        run, _ = compiled(model)
        assert torch.equal(run(X), X * 3)
        set_active(False)
        assert torch.equal(run(X), X)

    def test_is_exported_as_the_upstream_code(self, kind):
        set_choice("toy=quick")
        exported = torch.export.export(kind(), (X,))
        assert torch.equal(exported.module()(X), X)


@pytest.mark.usefixtures("toy")
def test_the_reason_of_a_refusal_is_kept():
    set_choice("toy=quick")
    model = Guarded()
    compiled(model)[0](torch.arange(16).reshape(2, 8))
    assert model.slot.traced(model) == ("eager", "left to Inductor: quick refused the call: it is no float")


def wants(owner, *operands):
    return owner.wants


def unanswered(owner, reason, *operands):
    if owner.wants:
        raise KernelError(f"unanswered: {reason}", where="here", fix="none")


class Wanting(Guarded):
    """A guard whose caller may ask for what only a kernel gives."""

    def __init__(self, wants=True, **options):
        nn.Module.__init__(self)  # without the slot of the other op
        self.weight, self.wants = nn.Parameter(torch.ones(8)), wants
        self.slot = Slot("wanted", "scaled", __name__, **options)


@pytest.fixture
def wanted():
    with registry.restored():
        here = {"asks": f"{__name__}:wants", "settles": f"{__name__}:unanswered"}
        registry.add_op(Op("wanted", {"scaled": Variant("x * factor", f"{__name__}:plain", **here)}))
        registry.add(
            Kernel(
                "wanted", "scaled", "quick", f"{__name__}:thrice", f"{__name__}:takes_floats", traceable=True
            )
        )
        torch._dynamo.reset()
        yield


@pytest.mark.usefixtures("wanted")
class TestRequests:
    def test_auto_answers_them_with_a_kernel_that_does_not_beat_inductor(self):
        for wants, factor in ((True, 3), (False, 1)):
            run, _ = compiled(Wanting(wants))
            assert torch.equal(run(X), X * factor)

    def test_what_upstreams_code_leaves_unanswered_is_an_error(self):
        skips = {"Guarded.forward": ["Guarded.scale"]}  # counts as replaced, see below
        integers = torch.arange(16).reshape(2, 8)
        for run in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
            for model, x, reason in (
                (Wanting(), integers, "it is no float|quick refused"),
                (Wanting(skips=skips), X, "replaced"),
            ):
                with pytest.raises(KernelError, match=f"unanswered: .*({reason})"):
                    run(model)(x)
                model.wants = False
                assert torch.equal(run(model)(x), x)

    def test_there_are_none_while_the_hook_is_off(self):
        set_active(False)
        assert torch.equal(Wanting()(X), X)
        assert torch.equal(compiled(Wanting())[0](X), X)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_reason_that_dynamo_cannot_compute_breaks_no_graph(toy, dynamic):
    registry.add(
        Kernel(**{**toy, "refuses": f"{__name__}:takes_none_of_this_length"}, backend="picky", traceable=True)
    )
    set_choice("toy=picky")
    model = Guarded()
    run = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(run(X), X)
    backend, reason = model.slot.traced(model)
    assert backend == "eager" and reason.startswith("left to Inductor: picky refused the call")


def test_auto_takes_what_beats_inductor(toy):
    registry.add(Kernel(**toy, backend="best", traceable=True, beats_inductor=True))
    run, _ = compiled(Guarded())
    assert torch.equal(run(X), X * 3)


@pytest.mark.usefixtures("toy")
def test_a_replaced_definition_is_the_reason_why_no_kernel_was_asked():
    set_choice("toy=quick")
    model = Guarded()
    # Outside the frame of a module, what a kernel skips counts as replaced.
    model.slot = Slot("toy", "scaled", __name__, skips={"Guarded.forward": ["Guarded.scale"]})
    run, _ = compiled(model)
    assert torch.equal(run(X), X)
    told = model.slot.traced(model, compiled=True)
    assert told == (
        "eager",
        "left to Inductor: a function or method that a kernel would not call was replaced",
    )
