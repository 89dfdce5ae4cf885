import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import parse_choice
from veomni_hook.kernels.selection.declaration import Kernel, Op, Requirement, Variant
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import select
from veomni_hook.kernels.selection.system import System

CPU = System("cpu", torch="2.13")
SM80, SM90, SM100 = (System("cuda", (major, 0), "2.13", "3.5") for major in (8, 9, 10))
ASCEND = System("npu", torch="2.13")


@pytest.fixture(autouse=True)
def known():
    """The built-in kernels and two that need hardware."""
    name = {"op": "rms_norm", "variant": "cast_before_weight", "load": "a:b", "priority": 20}
    on_hopper = Requirement(("cuda",), (9, 0), triton=True)
    with registry.restored():
        registry.add(Kernel(**name, backend="tensor_cores", requires=on_hopper))
        registry.add(Kernel(**name, backend="ascend", requires=Requirement(("npu",))))
        yield


def chosen(choice, system):
    return select("rms_norm", "cast_before_weight", parse_choice(choice), system)


@pytest.mark.parametrize(
    ("system", "backends"),
    [
        (CPU, ["torch"]),
        (System("cuda", (7, 5), "2.13", "3.5"), ["torch"]),
        (System("cuda", (9, 0), "2.13"), ["torch"]),
        (SM80, ["triton", "torch"]),
        (SM90, ["tensor_cores", "triton", "torch"]),
        (SM100, ["tensor_cores", "triton", "torch"]),
        (ASCEND, ["ascend", "torch"]),
    ],
    ids=str,
)
def test_auto_takes_the_best_that_can_run(system, backends):
    selection = chosen("auto", system)
    assert [kernel.backend for kernel in selection.candidates] == backends
    assert selection.kernel is selection.candidates[0]
    assert {each.backend for each in selection.decisions} == {
        "tensor_cores",
        "ascend",
        "triton",
        "npu",
        "torch",
        "reference",
        "liger",
        "eager",
    }
    assert all(each.reason for each in selection.decisions)


def test_a_rejection_says_what_was_needed_and_found():
    reasons = {each.backend: each.reason for each in chosen("auto", SM80).decisions if not each.accepted}
    assert reasons["tensor_cores"] == "needs compute capability 9.0, found 8.0"
    assert reasons["ascend"] == "needs a device of type npu, found cuda"


def test_a_name_is_the_only_candidate():
    assert [each.backend for each in chosen("torch", SM90).candidates] == ["torch"]
    assert [each.backend for each in chosen("rms_norm=ascend", ASCEND).candidates] == ["ascend"]


def test_eager_is_no_kernel():
    selection = chosen("eager", SM90)
    assert selection.kernel is None and not selection.candidates


def test_a_name_that_cannot_run_lists_what_can_and_why_not():
    selection = chosen("rms_norm=tensor_cores", CPU)
    assert selection.kernel is None and not any(each.accepted for each in selection.decisions)
    with pytest.raises(KernelError) as caught:
        selection.checked("some.module")
    error = caught.value
    assert "needs a device of type cuda, found cpu" in error.what
    assert "rms_norm=auto, one of: auto, eager, torch, reference;" in error.fix
    assert "ascend (needs" in error.fix
    assert error.where == "some.module, on cpu, torch 2.13, no triton"
    assert chosen("torch", CPU).checked("some.module").kernel is not None


def test_a_preset_leaves_the_ops_that_it_has_no_kernels_for():
    selection = select("rotary", "half_split", parse_choice("tensor_cores"), SM90).checked()
    assert selection.kernel is None
    upstream = selection.decisions[-1]
    assert upstream.accepted
    assert upstream.reason == "tensor_cores is chosen and has no kernels for rotary"


@pytest.mark.parametrize("choice", ["tensor_cores", "rms_norm=tensor_cores"])
def test_a_listed_op_without_a_kernel_for_the_variant_is_an_error(choice):
    selection = select("rms_norm", "without_cast", parse_choice(choice), SM90)
    with pytest.raises(KernelError, match="rms_norm/without_cast has no 'tensor_cores' kernel"):
        selection.checked()


def test_distributions_are_looked_for():
    wanted = Requirement(distributions=("liger_kernel",))
    assert wanted.unmet(CPU) == "needs liger_kernel, which is not installed"
    assert wanted.unmet(System("cpu", distributions={"liger_kernel": "0.8"})) is None
    assert wanted.unmet(System.named("sm90")) is None


def test_the_reference_is_chosen_by_name_only():
    decisions = {each.backend: each for each in chosen("auto", CPU).decisions}
    assert not decisions["reference"].accepted
    assert decisions["reference"].reason == "runs only if chosen by name"
    assert [each.backend for each in chosen("reference", CPU).candidates] == ["reference"]


def test_a_variant_without_automatic_kernels_runs_the_upstream_code():
    with registry.restored():
        registry.add_op(Op("sum", {"plain": Variant("a + b", "operator:add")}))
        assert select("sum", "plain", parse_choice("auto"), CPU).kernel is None
        by_name = select("sum", "plain", parse_choice("reference"), CPU).kernel
    assert by_name is not None and by_name.load == "operator:add"


def test_unknown_variants_are_errors():
    with pytest.raises(KernelError, match="no variant"):
        select("rms_norm", "standard", parse_choice("auto"), CPU)
