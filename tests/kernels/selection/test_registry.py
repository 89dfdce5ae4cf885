import dataclasses
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import outputs, started
from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection import declaration
from veomni_hook.kernels.selection.declaration import REFERENCE, Kernel, Op, Requirement, Variant
from veomni_hook.kernels.selection.registry import Registry, built_in, load_attribute, registry
from veomni_hook.kernels.selection.system import System


def kernel(**changes):
    given = {"op": "rms_norm", "variant": "cast_before_weight", "backend": "mine", "load": "a.b:c"}
    return Kernel(**{**given, **changes})


@pytest.fixture
def fresh():
    """A registry of its own, with every built-in declaration."""
    return Registry()


def test_every_variant_has_a_reference_and_all_code_loads():
    tables = Path(declaration.__file__).parents[1].glob("*/variants.py")
    assert [*registry.ops()] == sorted(path.parent.name for path in tables)
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


def test_a_zip_file_has_the_same_ops(tmp_path):
    package = Path(declaration.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, Path(package.name) / path.relative_to(package))
    script = (
        "from veomni_hook.kernels.selection import registry\n"
        "assert '.zip' in registry.__file__\n"
        "print(*registry.built_in())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site.zip")},
    )  # fmt: skip
    assert tuple(done.stdout.split()) == built_in()


def test_declarations_do_not_import_torch():
    script = (
        "import sys, veomni_hook.kernels.selection.registry as r, veomni_hook.kernels.slot, veomni_hook.tools.report.explanation\n"
        "print(len(r.registry.kernels()), 'torch' in sys.modules)"
    )
    count, torch_loaded = outputs(started("-c", script))[0].split()
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


def test_a_block_undoes_what_is_declared_in_it(fresh):
    ops, kernels, version = dict(fresh.ops()), fresh.kernels(), fresh.version
    with fresh.restored():
        fresh.add_op(Op("toy", {"only": Variant("x", "a.b:c")}))
        fresh.add(kernel())
        fresh.add(kernel(backend=REFERENCE))
        fresh.replace(kernel(backend="torch"))
        assert "toy" in fresh.ops() and "mine" in fresh.backends("rms_norm")
    assert (dict(fresh.ops()), fresh.kernels()) == (ops, kernels)
    assert fresh.version > version  # slots look their kernels up again
    fresh.add(kernel(backend=REFERENCE))  # the derived one may be declared, as before


def test_a_replaced_kernel_keeps_its_place(fresh):
    variant = "rms_norm", "cast_before_weight"
    order = [each.backend for each in fresh.kernels(*variant)]
    (triton,) = (each for each in fresh.kernels(*variant) if each.backend == "triton")
    anywhere = dataclasses.replace(triton, requires=Requirement())
    fresh.replace(anywhere)
    assert [each.backend for each in fresh.kernels(*variant)] == order
    assert anywhere in fresh.kernels(*variant) and triton not in fresh.kernels(*variant)
    with pytest.raises(KeyError):
        fresh.replace(kernel(backend="nobodys"))


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
    [
        ({"op": "rms"}, "qk_norm_rotary, rms_norm, rotary"),
        ({"variant": "standard"}, "cast_before_weight"),
    ],
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
        def run(value, code, **variables):
            info = tmp_path / "announcing-1.0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announcing\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[veomni_hook.kernels]\ntheirs = {value}\n")
            (tmp_path / "theirs.py").write_text(
                "from veomni_hook import Kernel\n"
                "ONE = Kernel('rms_norm', 'unweighted', 'theirs', 'theirs:run', description='a test')\n"
                "KERNELS = (ONE, Kernel('rotary', 'pairs', 'theirs', 'theirs:run'))\n"
                "WRONG = 3\n"
                "TWICE = (*KERNELS, ONE)\n"
                "ODD = (ONE, Kernel(['rotary'], 'pairs', 'theirs', 'theirs:run'))\n"
                "REFERENCE = Kernel('rms_norm', 'unweighted', 'reference', 'theirs:run', automatic=False)\n"
                "FIRST = Kernel('rms_norm', 'cast_before_weight', 'theirs', 'broken:run', priority=99)\n"
            )
            (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
            (tmp_path / "broken.py").write_text("raise RuntimeError('no device')\n")
            script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
            environ = {**os.environ, **{name: value for name, value in variables.items() if value}}
            return subprocess.run(
                [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False
            )

        return run

    @pytest.mark.parametrize(
        ("value", "found"),
        [("theirs:ONE", "rms_norm"), ("theirs:KERNELS", "rms_norm rotary"), ("theirs", "rms_norm rotary")],
    )
    def test_kernels_are_listed_like_ours(self, announce, value, found):
        code = (
            "from veomni_hook.kernels.selection.registry import registry\nprint(*registry.preset('theirs'))"
        )
        assert announce(value, code).stdout.strip() == found

    @pytest.mark.slow
    def test_the_command_lists_them(self, announce):
        code = "from veomni_hook.tools.cli.app import main\nsys.argv = ['veomni-hook', 'explain', '--json']\nmain()"
        assert '"backend": "theirs"' in announce("theirs", code).stdout

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("theirs:WRONG", "is not a veomni_hook.Kernel"),
            ("nowhere:ONE", "cannot be loaded: ModuleNotFoundError"),
            ("theirs:TWICE", "already has a 'theirs' kernel"),
            ("theirs:ODD", "there is no op"),
            ("exits", "cannot be loaded: SystemExit: 3"),
            ("theirs:", "cannot be loaded"),
        ],
    )
    def test_what_is_wrong_names_the_distribution_and_leaves_it_out(self, announce, value, said):
        code = (
            "from veomni_hook.kernels.selection.registry import registry\n"
            "for _ in range(2):\n    print('theirs' in registry.backends(), len(registry.kernels()) > 20)\n"
        )
        done = announce(value, code)
        assert done.stdout == "False True\n" * 2, done.stderr
        assert said in done.stderr
        assert done.stderr.count("entry point 'theirs' of announcing (veomni_hook.kernels) is left out") == 1
        assert "VEOMNI_PLUGINS=0" in done.stderr
        strict = announce(value, code, VEOMNI_STRICT="1")
        assert strict.returncode == 1 and "KernelError" in strict.stderr and "announcing" in strict.stderr

    def test_under_strict_everyone_who_asks_is_told(self, announce):
        code = (
            "from veomni_hook.errors import KernelError\nfrom veomni_hook.kernels.selection.registry import registry\n"
            "for _ in range(2):\n    try: registry.kernels()\n    except KernelError as e: print(e.where)\n"
        )
        done = announce("theirs:WRONG", code, VEOMNI_STRICT="1")
        assert done.stdout == "entry point 'theirs' of announcing (veomni_hook.kernels)\n" * 2

    @pytest.mark.parametrize(
        ("plugins", "known"),
        [
            (None, True),
            ("0", False),
            ("none", False),
            ("other", False),
            ("Announcing", True),
            ("other,theirs", True),
        ],
    )
    def test_the_setting_switches_them(self, announce, plugins, known):
        code = (
            "from veomni_hook.kernels.selection.registry import registry\n"
            "print('theirs' in registry.backends(), 'theirs' in sys.modules)"
        )
        done = announce("theirs", code, VEOMNI_PLUGINS=plugins)
        assert done.stdout == f"{known} {known}\n", done.stderr

    def test_an_activation_switches_them(self, announce):
        code = (
            "import veomni_hook\nfrom veomni_hook.finders.settings_in_force import current_settings\n"
            "from veomni_hook.kernels.selection.registry import registry\n"
            "def known(): current_settings(); return 'theirs' in registry.backends(), registry.version\n"
            "print(known()[0], end=' ')\n"
            "with veomni_hook.activate(plugins=False):\n    print(known()[0], end=' ')\n"
            "before = known()[1]\n"
            "with veomni_hook.activate(plugins=['announcing']):\n    print(known()[0], known()[1] > before)"
        )
        assert announce("theirs", code).stdout == "True False True False\n"

    def test_a_reference_of_theirs_gives_ours_back(self, announce):
        code = (
            "import veomni_hook\nfrom veomni_hook.finders.settings_in_force import current_settings\n"
            "from veomni_hook.kernels.selection.registry import registry\n"
            "def load(): current_settings(); return next(k.load for k in registry.kernels('rms_norm', 'unweighted') "
            "if k.backend == 'reference')\n"
            "theirs = load()\nwith veomni_hook.activate(plugins=False):\n    print(theirs, load() != theirs)"
        )
        assert announce("theirs:REFERENCE", code).stdout == "theirs:run True\n"

    @pytest.mark.slow
    def test_code_that_fails_at_a_call_leaves_the_plugin_out_under_auto(self, announce):
        code = (
            "import logging\nfrom veomni_hook.errors import KernelError\n"
            "from veomni_hook.kernels.slot.candidates import Answers, Site\n"
            "from veomni_hook.kernels.selection.choice import parse_choice\n"
            "site = Site('rms_norm', 'cast_before_weight', 'm', set())\n"
            "print([c.backend for c in Answers(site, parse_choice('auto')).candidates('cpu')])\n"
            "try: Answers(site, parse_choice('theirs'))\nexcept KernelError as error: print(error.what)"
        )
        done = announce("theirs:FIRST", code)
        assert done.stdout == "['torch']\nthere is no backend 'theirs'\n", done.stderr
        assert "RuntimeError: no device" in done.stderr and "announcing" in done.stderr
        named = "print(Answers(site, parse_choice('theirs')).candidates('cpu'))"
        done = announce("theirs:FIRST", code[: code.index("print([")] + named)
        assert done.returncode == 1
        assert "RuntimeError: no device" in done.stderr and "VEOMNI_PLUGINS=0" in done.stderr

    def test_a_list_that_cannot_be_read_takes_no_other_with_it(self, announce, tmp_path):
        other = tmp_path / "garbled-1.0.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: garbled\nVersion: 1.0\n")
        (other / "entry_points.txt").write_text("[veomni_hook.kernels]\nno equals sign\n")
        code = "from veomni_hook.kernels.selection.registry import registry\nprint('theirs' in registry.backends())"
        done = announce("theirs", code)
        assert done.stdout == "True\n", done.stderr
        assert "garbled" in done.stderr


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
        (Requirement(min_capability=(9, 0)), System("cuda", (8, 0)), "needs compute capability 9.0, found 8.0"),
        (Requirement(min_capability=(8, 0)), System("cuda", (9, 0)), None),
        (Requirement(min_capability=(8, 0)), System("cpu"), "needs compute capability 8.0, found none"),
        (Requirement(triton=True), System("cuda"), "needs triton, which is not installed"),
        (Requirement(triton=True), System("cuda", triton="3.2"), None),
    ],
)  # fmt: skip
def test_requirements(requirement, system, unmet):
    assert requirement.unmet(system) == unmet
