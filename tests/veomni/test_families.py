"""Every config of VeOmni: models of the hooked module beside models of VeOmni's generated one.

Without idioms both run the same code, and all numbers are the same bits. With idioms and ``VEOMNI_KERNELS=torch`` our
kernels round differently; the tolerance is that of the other tests of models (`tests/integration/test_experts.py`).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.veomni.configurations import CLASSES, CONFIGURATIONS
from tests.veomni.conftest import in_process
from tests.veomni.sides import CONFIGS, config_module
from tests.veomni.unable import UNABLE
from veomni_hook.kernels.selection.registry import registry

REPLACED = ("class_replacement", "method_override", "function_replacement")
SETTINGS = {"alone": {"IDIOMS": "0"}, "with idioms": {"IDIOMS": "1", "KERNELS": "torch"}}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What a config's models gave; one process runs all configs of a device."""

    @cache
    def of_device(mode: str, device: str) -> dict[str, Any]:
        folders = [folder for folder, named in CONFIGS if named == device]
        return in_process(
            tmp_path_factory.mktemp("families") / "cache", "facts", device, *folders,
            configs=[(folder, device) for folder in folders], DEVICE=device, **SETTINGS[mode],
        )  # fmt: skip

    def of_config(mode: str, folder: str, device: str) -> dict[str, Any]:
        given = of_device(mode, device)
        found: dict[str, Any] = given["found"][folder]
        assert "broken" not in found, found["broken"]
        family = CONFIGURATIONS[folder][0]
        report = given["reports"][f"transformers.models.{family}.modeling_{family}"]["report"]
        return {**found, "report": report}

    return of_config


each_config = pytest.mark.parametrize(("folder", "device"), CONFIGS)


@each_config
def test_the_numbers_are_those_of_the_generated_module(facts, folder, device):
    found = facts("alone", folder, device)
    for name, call in found["calls"].items():
        assert not call["failed"], name
        assert not call["differences"], (name, call["differences"])
        assert call["gradients"] > 20
    config = f"{config_module(folder, device)}:"
    assert any(patch["config"].startswith(config) for patch in found["report"]["applied"])
    assert all(patch["config"].startswith(config) for patch in found["report"]["applied"])


@each_config
def test_pictures_and_empty_pictures_reach_the_same_parameters(facts, folder, device):
    """So that the inputs reach what they are for: the towers, and VeOmni's forward of an empty picture."""
    calls = facts("alone", folder, device)["calls"]
    trained = CLASSES[folder][0]
    if f"{trained}/media/eager" not in calls:
        assert "vision_config" not in str(CONFIGURATIONS[folder][2])
        return
    media, dummy, packed = (calls[f"{trained}/{name}/eager"] for name in ("media", "dummy", "packed"))
    assert media["gradients"] == dummy["gradients"] > packed["gradients"] + 20
    assert dummy["loss"] == packed["loss"]


@each_config
def test_no_number_is_lost_with_idioms(facts, folder, device):
    alone, found = (facts(mode, folder, device) for mode in SETTINGS)
    assert found["calls"].keys() == alone["calls"].keys()
    for name, call in found["calls"].items():
        assert not call["failed"], name
        assert call["gradients"] == alone["calls"][name]["gradients"]
        far = {what: told for what, told in call["differences"].items() if not _close(told)}
        assert not far, (name, far)


@each_config
def test_the_config_wins_and_the_rest_is_routed(facts, folder, device):
    found = facts("with idioms", folder, device)
    applied, config = found["report"]["applied"], f"{config_module(folder, device)}:"
    ours = {patch["target"] for patch in applied if patch.get("op")}
    theirs = {
        patch["target"]
        for patch in applied
        if patch["config"].startswith(config) and patch["kind"] in REPLACED
    }
    assert theirs
    assert not {target for target in ours if target in theirs or target.rpartition(".")[0] in theirs}
    alone = facts("alone", folder, device)["report"]["applied"]
    kept = {(patch["kind"], patch["target"]) for patch in applied if patch["config"].startswith(config)}
    assert kept == {(patch["kind"], patch["target"]) for patch in alone}
    assert all(config in told["reason"] for told in found["report"]["yielded"])
    # What has kernels, in this module: activations are in a module that all models share.
    ran = {op for _, op, backend, times in found["rows"] if backend == "torch" and times} - {"activation"}
    routed = {patch["op"] for patch in applied if patch.get("op")} & {*registry.names()}
    assert bool(ran) == bool(routed)
    assert ran <= routed


def test_routes_remain_in_most_families(facts):
    remaining = {
        folder
        for folder, device in CONFIGS
        if any(row[2] == "torch" and row[3] for row in facts("with idioms", folder, device)["rows"])
    }
    # The others' configs replace every operation that we have kernels for.
    assert remaining == CONFIGURATIONS.keys() - {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v4"}


@pytest.mark.parametrize(("folder", "device"), sorted(UNABLE))
def test_what_has_a_stand_in_does_not_run_without(facts, folder, device):
    expected = UNABLE[folder, device].error
    generated, *hooked = facts("alone", folder, device)["without"]
    assert expected in generated
    assert hooked == [generated] * (not UNABLE[folder, device].left_out)


def test_the_table_has_every_config():
    spec = find_spec("veomni")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found = {
        ".".join(("veomni", *file.relative_to(root).with_suffix("").parts))
        for file in root.glob("models/transformers/*/*_patch_gen_config.py")
    }
    assert {config_module(*config) for config in CONFIGS} == found
    assert UNABLE.keys() <= set(CONFIGS)


def _close(told):
    return isinstance(told, dict) and told["close"]
