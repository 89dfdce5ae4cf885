"""`list --by site` over a package that is only read, with the idiom for tests: see `tests.tools.cli.transcript`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.patches import fake_idiom
from veomni_hook.kernels.selection.declaration import Kernel, Op, Variant
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.idioms import recognise

from ..transcript import compare, here

NORM = "class {name}:\n    def forward(self, x):\n        return self.scale {sign} x\n\n\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A transformers package of two families in the working directory: three candidates, one of them missed."""
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
    for name in ("idioms", "every_idiom"):
        monkeypatch.setattr(recognise, name, lambda *_: (fake_idiom.module(),))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_printed(package: Path) -> None:
    compare("sites", here, {})


def test_a_variant_without_a_kernel(package: Path) -> None:
    with registry.restored():
        registry.add_op(Op("scaling", {name: Variant(name, f"nowhere:{name}") for name in ("times", "plus")}))
        registry.add(Kernel("scaling", "plus", "quick", "nowhere:quick"))
        registry.add(Kernel("scaling", "times", "torch", "nowhere:times", automatic=False))
        compare("no_kernel", here, {})
        registry.add(Kernel("scaling", "times", "large", "nowhere:large", automatic=False))
        (row,) = json.loads(here(["list", "--by", "site", "--source", ".", "--json", "good"], {}).out)
        assert row["reason"] == "auto uses none of its kernels; choose one by name: torch, large"


def test_a_file_in_an_unknown_encoding_is_an_error(package: Path) -> None:
    (package / "transformers" / "models" / "good" / "modeling_coded.py").write_bytes(b"# coding: klingon\n")
    done = here(["list", "--by", "site", "--source", ".", "--json"], {})
    assert done.status == 1 and "coded" in done.err
    assert [row["module"] for row in json.loads(done.out) if row["status"] == "error"] == [
        "transformers.models.good.modeling_coded"
    ]


def test_experts_of_the_installed_release_that_no_machine_has_a_kernel_for() -> None:
    done = here(["list", "--json", "llama4", "switch_transformers", "qwen3_next"], {})
    found = {(row["op"], row["variant"]) for row in json.loads(done.out) if row["status"] == "no_kernel"}
    assert ("moe_experts", "batched_gated") in found and ("moe_experts", "modules") in found
    assert not any(op == "qk_norm_rotary" for op, _ in found)
