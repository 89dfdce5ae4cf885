from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from veomni_hook.tools.cli.inputs import targets
from veomni_hook.tools.cli.inputs.targets import (
    complete_family,
    families,
    family_of,
    modeling_files,
    module_name,
)
from veomni_hook.tools.cli.usage import UsageError


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A transformers folder with one family of each shape."""
    files = [
        "qwen3/modeling_qwen3.py", "qwen3/configuration_qwen3.py", "qwen3_moe/modeling_qwen3_moe.py",
        "blip/modeling_blip.py", "blip/modeling_blip_text.py", "donut/modeling_donut_swin.py",
        "data2vec/modeling_data2vec_audio.py", "data2vec/modeling_data2vec_text.py",
        "byt5/tokenization_byt5.py", "auto/modeling_auto.py", "__init__.py",
    ]  # fmt: skip
    for file in files:
        path = tmp_path / "models" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(targets, "transformers_folder", lambda: str(tmp_path))
    yield tmp_path / "models"


@pytest.mark.parametrize(
    ("given", "module"),
    [
        ("qwen3", "transformers.models.qwen3.modeling_qwen3"),
        ("blip", "transformers.models.blip.modeling_blip"),
        ("blip_text", "transformers.models.blip.modeling_blip_text"),
        ("donut", "transformers.models.donut.modeling_donut_swin"),
        ("donut_swin", "transformers.models.donut.modeling_donut_swin"),
        ("data2vec_text", "transformers.models.data2vec.modeling_data2vec_text"),
        ("my.package.modeling_x", "my.package.modeling_x"),
        ("Qwen3", "transformers.models.qwen3.modeling_qwen3"),
        ("Qwen3ForCausalLM", "transformers.models.qwen3.modeling_qwen3"),
        ("Qwen3MoeForCausalLM", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
        ("Qwen/Qwen3-0.6B", "transformers.models.qwen3.modeling_qwen3"),
        ("My.Module", "My.Module"),
    ],
)
def test_what_a_user_types_names_a_module(models: Path, given: str, module: str) -> None:
    assert module_name(given) == module


def test_a_saved_model_and_one_in_the_hubs_cache_say_their_family(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    moe = "transformers.models.qwen3_moe.modeling_qwen3_moe"
    for folder in (tmp_path / "saved", tmp_path / "models--Qwen--Qwen3-30B-A3B" / "snapshots" / "1"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert module_name(str(tmp_path / "saved")) == module_name("Qwen/Qwen3-30B-A3B") == moe
    assert not capsys.readouterr().err
    (tmp_path / "saved").rename(tmp_path / "blip")
    monkeypatch.chdir(tmp_path)
    assert module_name("blip") == "transformers.models.blip.modeling_blip"
    (tmp_path / "blip").rename(tmp_path / "saved")
    assert module_name("Qwen/Qwen3-8B") != moe
    assert "Qwen/Qwen3-8B is not in the hub's cache" in capsys.readouterr().err
    (tmp_path / "saved" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="does not say a model_type"):
        module_name(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    "module",
    [
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.blip.modeling_blip_text",
        "transformers.models.donut.modeling_donut_swin",
        "elsewhere.modeling_x",
    ],
)
def test_the_short_name_leads_back_to_the_module(models: Path, module: str) -> None:
    assert module_name(family_of(module)) == module


@pytest.mark.parametrize("given", ["qwen33", "Qwne3", "qwen-3", "qwne3"])
def test_an_unknown_family_is_answered_with_the_nearest(models: Path, given: str) -> None:
    with pytest.raises(UsageError) as caught:
        module_name(given)
    assert f"unknown family {given!r}" in caught.value.what
    assert "6 families" in caught.value.where
    assert caught.value.fix.startswith("nearest names: qwen3")


def test_names_that_have_little_in_common_are_not_suggested(models: Path) -> None:
    with pytest.raises(UsageError) as caught:
        module_name("nope")
    assert caught.value.fix == "`veomni-hook list --all` shows every family"


def test_a_family_of_several_files_asks_which(models: Path) -> None:
    with pytest.raises(UsageError, match="2 modeling files") as caught:
        module_name("data2vec")
    assert "data2vec_audio, data2vec_text" in caught.value.fix


def test_a_folder_without_modeling_code_is_no_family(models: Path) -> None:
    assert set(families()) == {"qwen3", "qwen3_moe", "blip", "donut", "data2vec", "auto"}
    assert modeling_files("byt5") == modeling_files("nothing") == modeling_files("__init__.py") == ()


def test_completion(models: Path) -> None:
    assert complete_family("qw") == ["qwen3", "qwen3_moe"]
    assert complete_family("b") == ["blip"]
    assert complete_family("transformers.models.b") == [
        "transformers.models.blip.modeling_blip",
        "transformers.models.blip.modeling_blip_text",
    ]
    assert complete_family("transformers.models.blip.modeling_blip_") == [
        "transformers.models.blip.modeling_blip_text"
    ]
    assert complete_family("zz") == []


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(targets.PathFinder, "find_spec", lambda name: None)
    assert complete_family("q") == []
    with pytest.raises(UsageError, match="not installed"):
        module_name("qwen3")


def test_the_installed_transformers() -> None:
    found = families()
    assert len(found) > 300
    assert found["qwen3"] == ("modeling_qwen3",)
    for family in ("qwen3", "llama", "esm"):
        module = module_name(family)
        assert os.path.isfile(os.path.join(targets.transformers_folder(), *module.split(".")[1:]) + ".py")
