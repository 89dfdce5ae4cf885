from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import (
    REFERENCE,
    Kernel,
    Op,
    Registry,
    Requirement,
    Variant,
    load_attribute,
    registry,
)
from veomni_hook.kernels.system import System


def kernel(**changes):
    given = {"op": "rms_norm", "variant": "cast_before_weight", "backend": "mine", "load": "a.b:c"}
    return Kernel(**{**given, **changes})


@pytest.fixture
def fresh():
    """A registry of its own, with every built-in declaration."""
    return Registry()


def test_every_variant_has_a_reference_and_all_code_loads():
    assert {*registry.ops()} == {
        "rms_norm",
        "add_rms_norm",
        "rotary",
        "qk_norm_rotary",
        "gated_mlp",
        "moe_experts",
        "moe_router",
        "load_balancing_loss",
        "linear_cross_entropy",
    }
    for op in registry.ops().values():
        for name, variant in op.variants.items():
            assert variant.formula
            assert callable(load_attribute(variant.reference))
            kernels = {each.backend: each for each in registry.kernels(op.name, name)}
            assert not kernels["reference"].automatic
    for each in registry.kernels():
        if "liger_kernel" in each.requires.distributions and find_spec("liger_kernel") is None:
            continue  # its code imports it
        for reference in (each.load, each.refuses, each.loses):
            assert reference is None or callable(load_attribute(reference))
        assert each.description


def test_declarations_do_not_import_torch():
    script = (
        "import sys, veomni_hook.kernels.registry as r, veomni_hook.kernels.slot, veomni_hook.kernels.explain\n"
        "print(len(r.registry.kernels()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, torch_loaded = done.stdout.split()
    assert int(count) >= 4 and torch_loaded == "False"


def test_a_kernel_joins(fresh):
    fresh.add(kernel())
    assert fresh.backends("rms_norm") == [
        "auto",
        "eager",
        "triton",
        "npu",
        "torch",
        "mine",
        "reference",
        "liger",
    ]
    assert "mine" not in fresh.backends("rotary")


def test_priority_orders_kernels(fresh):
    fresh.add(kernel(backend="late"))
    fresh.add(kernel(backend="first", priority=5))
    order = [each.backend for each in fresh.kernels("rms_norm", "cast_before_weight")]
    assert order == ["triton", "npu", "first", "torch", "late", "reference", "liger"]


def test_a_declared_reference_takes_the_place_of_the_derived_one(fresh):
    fresh.ops()
    fresh.add_op(Op("sum", {"plain": Variant("a + b", "operator:add")}))
    own = Kernel("sum", "plain", REFERENCE, "operator:concat", automatic=False)
    fresh.add(own)
    assert fresh.kernels("sum") == [own]
    with pytest.raises(KernelError, match="already"):
        fresh.add(own)


def test_duplicates_are_refused(fresh):
    with pytest.raises(KernelError, match="already") as caught:
        fresh.add(kernel(backend="torch"))
    assert "rms_norm.torch:rms_norm" in caught.value.where
    with pytest.raises(KernelError, match="twice"):
        fresh.add_op(Op("rotary", {}))
        fresh.ops()
        fresh.add_op(Op("rotary", {}))


@pytest.mark.parametrize(
    ("changes", "listed"),
    [({"op": "rms"}, "rms_norm, rotary"), ({"variant": "standard"}, "cast_before_weight")],
)
def test_unknown_names_list_the_known_ones(fresh, changes, listed):
    with pytest.raises(KernelError) as caught:
        fresh.add(kernel(**changes))
    assert listed in caught.value.fix


@pytest.mark.parametrize(
    "changes", [{"backend": "auto"}, {"backend": "eager"}, {"backend": "a-b"}, {"load": "x"}]
)
def test_invalid_kernels_are_refused(changes):
    with pytest.raises(KernelError):
        kernel(**changes)


def test_a_preset_is_the_ops_that_a_backend_has_kernels_for(fresh):
    assert fresh.preset("reference") == tuple(fresh.ops())
    fresh.add(kernel(op="rotary", variant="half_split"))
    fresh.add(kernel())
    assert fresh.preset("mine") == ("rms_norm", "rotary")
    assert fresh.preset("nobody") == ()


class TestEntryPoints:
    """Installed distributions announce kernels."""

    @pytest.fixture
    def announce(self, tmp_path):
        def run(value, code):
            info = tmp_path / "announcing-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announcing\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[veomni_hook.kernels]\ntheirs = {value}\n")
            (tmp_path / "theirs.py").write_text(
                "from veomni_hook import Kernel\n"
                "ONE = Kernel('rms_norm', 'unweighted', 'theirs', 'theirs:run', description='a test')\n"
                "KERNELS = (ONE, Kernel('rotary', 'pairs', 'theirs', 'theirs:run'))\n"
                "WRONG = 3\n"
            )
            script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
            return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

        return run

    @pytest.mark.parametrize(
        ("value", "found"),
        [("theirs:ONE", "rms_norm"), ("theirs:KERNELS", "rms_norm rotary"), ("theirs", "rms_norm rotary")],
    )
    def test_kernels_are_listed_like_ours(self, announce, value, found):
        code = "from veomni_hook.kernels.registry import registry\nprint(*registry.preset('theirs'))"
        assert announce(value, code).stdout.strip() == found

    def test_the_command_lists_them(self, announce):
        code = "from veomni_hook.cli.app import main\nsys.argv = ['veomni-hook', 'kernels', '--json']\nmain()"
        assert '"backend": "theirs"' in announce("theirs", code).stdout

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("theirs:WRONG", "is no veomni_hook.Kernel"),
            ("nowhere:ONE", "cannot be loaded: ModuleNotFoundError"),
        ],
    )
    def test_what_is_wrong_names_the_distribution(self, announce, value, said):
        code = "from veomni_hook.kernels.registry import registry\nregistry.ops()"
        done = announce(value, code)
        assert done.returncode == 1
        assert said in done.stderr and "entry point 'theirs' of announcing" in done.stderr


@pytest.mark.parametrize("reference", ["no_such_module:x", "veomni_hook.errors:NoSuchError"])
def test_code_that_is_missing(reference):
    with pytest.raises(KernelError, match="cannot be loaded"):
        load_attribute(reference)


@pytest.mark.parametrize(
    ("requirement", "system", "unmet"),
    [
        (Requirement(), System("cpu"), None),
        (Requirement(devices=("cuda",)), System("cpu"), "needs a device of type cuda, found cpu"),
        (Requirement(devices=("cuda", "npu")), System("npu"), None),
        (
            Requirement(min_capability=(9, 0)),
            System("cuda", (8, 0)),
            "needs compute capability 9.0, found 8.0",
        ),
        (Requirement(min_capability=(8, 0)), System("cuda", (9, 0)), None),
        (Requirement(min_capability=(8, 0)), System("cpu"), "needs compute capability 8.0, found none"),
        (Requirement(triton=True), System("cuda"), "needs triton, which is not installed"),
        (Requirement(triton=True), System("cuda", triton="3.2"), None),
    ],
)
def test_requirements(requirement, system, unmet):
    assert requirement.unmet(system) == unmet
