from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.patches import fake_idiom
from veomni_hook.kernels.selection.declaration import Kernel, Op, Variant
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.idioms import recognise
from veomni_hook.tools.cli.app import app

from ..conftest import Command

NORM = "class {name}:\n    def forward(self, x):\n        return self.scale {sign} x\n\n\n"
FIELDS = ["module", "target", "op", "variant", "status", "reason", "code", "line"]

Sites = Callable[..., Result]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A transformers package of two families: three candidates, one of them missed."""
    files = {
        "__init__.py": '__version__ = "5.4.3"\n',
        "models/good/modeling_good.py": NORM.format(name="Good", sign="*")
        + NORM.format(name="Call", sign="+"),
        "models/mixed/modeling_mixed.py": NORM.format(name="Zed", sign="+")
        + NORM.format(name="Bad", sign="/"),
    }
    for name, text in files.items():
        path = tmp_path / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def sites(package: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    """Run `veomni-hook list --by site` over the package with the idiom for tests."""
    for name in ("idioms", "every_idiom"):
        monkeypatch.setattr(recognise, name, lambda *_: (fake_idiom.module(),))

    def run(*arguments: str, by: str = "site") -> Result:
        return CliRunner().invoke(app, ["list", "--by", by, "--source", str(package), *arguments])

    return run


def test_json_is_a_sorted_list_of_every_candidate(sites: Sites) -> None:
    done = sites("--json")
    rows = json.loads(done.stdout)
    assert done.exit_code == 0
    assert all([*row] == FIELDS for row in rows)
    assert [(row["target"], row["variant"], row["status"]) for row in rows] == [
        ("Good.forward", "times", "routed"),
        ("Bad.forward", "", "missed"),
        ("Zed.forward", "plus", "routed"),
    ]
    assert "expected Mult, found Div" in rows[1]["reason"]
    assert [(row["code"], row["line"]) for row in rows] == [("", 0), ("other_form", rows[1]["line"]), ("", 0)]
    assert f"(line {rows[1]['line']})" in rows[1]["reason"]


def test_the_table_ends_with_the_totals(sites: Sites) -> None:
    done = sites()
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["status", "op", "variant", "family", "target", "reason"]
    assert lines[1].split() == ["routed", "scaling", "times", "good", "Good.forward"]
    assert lines[-1].split() == ["scaling", "3", "2", "66.7", "%", "0", "1", "0", "0", "1", "0"]
    assert "transformers 5.4.3, 2 modules" in done.stderr


class TestWithoutAKernel:
    """Two variants of which the registry knows that no machine has a kernel for them, or for one of them."""

    @pytest.fixture(autouse=True)
    def declared(self) -> Iterator[None]:
        with registry.restored():
            self.declare()
            yield

    def declare(self) -> None:
        registry.add_op(Op("scaling", {name: Variant(name, f"nowhere:{name}") for name in ("times", "plus")}))
        registry.add(Kernel("scaling", "plus", "quick", "nowhere:quick"))
        registry.add(Kernel("scaling", "times", "torch", "nowhere:times", automatic=False))

    def test_it_is_counted_apart(self, sites: Sites) -> None:
        rows = json.loads(sites("--json").stdout)
        found = {row["target"]: (row["status"], row["reason"]) for row in rows}
        assert found["Zed.forward"] == ("routed", "")
        status, reason = found["Good.forward"]
        assert status == "no_kernel" and reason.startswith("no kernel exists for this formula on any machine")
        (total,) = json.loads(sites("--json", by="op").stdout)
        assert {name: total[name] for name in ("candidates", "routed", "no_kernel", "missed", "share")} == {
            "candidates": 3,
            "routed": 1,
            "no_kernel": 1,
            "missed": 1,
            "share": 33.33,
        }
        lines = sites().stdout.splitlines()
        assert lines[-1].split() == ["scaling", "3", "1", "33.3", "%", "1", "1", "0", "0", "1", "0"]

    def test_it_is_not_what_was_required(self, sites: Sites) -> None:
        assert sites("--require", "scaling=33").exit_code == 0
        done = sites("--require", "scaling=60")
        assert done.exit_code == 1 and "33.3 % routed, 60 % required" in done.stderr

    def test_it_is_among_what_is_missed(self, sites: Sites) -> None:
        rows = json.loads(sites("--json", "--missed").stdout)
        assert [row["target"] for row in rows] == ["Good.forward", "Bad.forward"]

    def test_a_kernel_by_name_is_one(self, sites: Sites) -> None:
        registry.add(Kernel("scaling", "times", "large", "nowhere:large", automatic=False))
        rows = json.loads(sites("--json", "good").stdout)
        assert [(row["status"], row["reason"]) for row in rows] == [
            ("routed", "auto uses none of its kernels; choose one by name: torch, large")
        ]


def test_experts_of_the_installed_release_that_no_machine_has_a_kernel_for() -> None:
    done = CliRunner().invoke(app, ["list", "--json", "llama4", "switch_transformers", "qwen3_next"])
    found = {(row["op"], row["variant"]) for row in json.loads(done.stdout) if row["status"] == "no_kernel"}
    assert ("moe_experts", "batched_gated") in found and ("moe_experts", "modules") in found
    assert not any(op == "qk_norm_rotary" for op, _ in found)


def test_a_family_a_module_or_a_file(sites: Sites, package: Path) -> None:
    module = "transformers.models.mixed.modeling_mixed"
    (package / "remote.py").write_text(NORM.format(name="Remote", sign="*"))
    for wanted, targets in [
        (["good"], ["Good.forward"]),
        (["mixed", "good"], ["Good.forward", "Bad.forward", "Zed.forward"]),
        ([module], ["Bad.forward", "Zed.forward"]),
        ([str(package / "remote.py")], ["Remote.forward"]),
    ]:
        assert [row["target"] for row in json.loads(sites("--json", *wanted).stdout)] == targets
    unknown = sites("goood")
    assert unknown.exit_code == 2 and "nearest names: good" in unknown.stderr


def test_what_is_missed_and_what_is_called(sites: Sites) -> None:
    assert [row["target"] for row in json.loads(sites("--json", "--missed").stdout)] == ["Bad.forward"]
    rows = json.loads(sites("--json", "--call-sites", "good").stdout)
    assert [row["target"] for row in rows] == ["Call.forward", "Good.forward"]


def test_totals_alone(sites: Sites) -> None:
    (total,) = json.loads(sites("--json", by="op").stdout)
    assert (total["op"], total["candidates"], total["routed"], total["share"]) == ("scaling", 3, 2, 66.67)
    assert len(sites(by="op").stdout.splitlines()) == 2


@pytest.mark.parametrize(("percent", "status"), [("66", 0), ("66.6", 0), ("67", 1), ("100", 1)])
def test_a_share_can_be_required(sites: Sites, percent: str, status: int) -> None:
    done = sites("--require", f"scaling={percent}", by="op")
    assert done.exit_code == status
    assert ("66.7 % routed" in done.stderr) == bool(status)


def test_a_share_of_a_part_can_be_required(sites: Sites, package: Path) -> None:
    file = package / "transformers" / "models" / "good" / "modeling_first.py"
    file.write_text(NORM.format(name="First", sign="/"))
    assert sites("--require", "scaling/firsts=0").exit_code == 0
    done = sites("--require", "scaling/firsts=50")
    assert done.exit_code == 1 and "scaling/firsts: 0.0 % routed, 50 % required" in done.stderr


@pytest.mark.parametrize("given", ["scaling", "scaling=", "scaling=lots", "other=3", "scaling/other=3"])
def test_a_requirement_that_means_nothing_is_wrong_use(sites: Sites, given: str) -> None:
    done = sites("--require", given)
    assert done.exit_code == 2 and "--require" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("option", ["--missed", "--call-sites", "--require=scaling=3"])
def test_what_is_about_sites_is_not_about_families(sites: Sites, option: str) -> None:
    done = sites(option, by="family")
    assert done.exit_code == 2 and "are about sites" in done.stderr and done.stdout == ""


def test_errors_are_named_and_hide_nothing(sites: Sites, package: Path) -> None:
    models = package / "transformers" / "models"
    (models / "good" / "modeling_broken.py").write_text("def f(:\n")
    (models / "good" / "modeling_failing.py").write_text("class A:\n    def forward(self):\n        boom\n")
    (models / "good" / "modeling_coded.py").write_bytes(b"# coding: klingon\n")
    done = sites("--json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    errors = {row["module"].rpartition("_")[2]: row for row in rows if row["status"] == "error"}
    assert set(errors) == {"broken", "failing", "coded"}
    assert errors["failing"]["op"] == "scaling" and "met boom" in errors["failing"]["reason"]
    assert all(name in done.stderr for name in errors)
    assert len(rows) == 6


def test_an_idiom_that_fails_everywhere_is_told_once(sites: Sites, package: Path) -> None:
    for family in ("good", "mixed"):
        file = package / "transformers" / "models" / family / f"modeling_{family}.py"
        file.write_text("class A:\n    def forward(self):\n        boom\n")
    done = sites()
    assert done.exit_code == 1 and done.stderr.count("met boom") == 1
    assert "modeling_good and 1 more: the idiom scaling raised" in done.stderr


def test_the_denominators_are_part_of_the_command(sites: Sites) -> None:
    assert "a forward that uses scale" in sites("--denominators").stdout
    assert json.loads(sites("--denominators", "--json").stdout) == {"scaling": ["a forward that uses scale"]}


def test_a_folder_that_holds_no_transformers_is_wrong_use(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["list", "--source", str(tmp_path / "nothing")])
    assert done.exit_code == 2 and "no transformers package" in done.stderr


def test_the_command_works_in_processes_of_its_own(tiny: Command) -> None:
    done = tiny("list", "--by", "site", "--json", "--jobs", "2")
    assert done.status == 0 and isinstance(done.json, list)
    assert done.err.startswith("transformers 5.99.0, ") and done.err.count("\n") == 1
