"""The runs on newer releases (`newer.py`), on the release that the configs are made for: there all patches apply."""

from pathlib import Path

from tests.veomni.conftest import in_process
from veomni_hook.tools.cli.inputs.sources import source_tree

#: Their models take the text that upstream's take.
FOLDERS = ("llama", "qwen2", "gemma3")


def test_all_patches_apply_and_the_numbers_are_those_of_plain_models(tmp_path):
    cache, file = tmp_path / "cache", str(tmp_path / "plain.pt")
    in_process(cache, "newer", "plain", file, *FOLDERS, configs=[])
    base = str(Path(source_tree().folder).parent)
    given = in_process(cache, "newer", base, file, "gpu", *FOLDERS, configs=[], IDIOMS="0", DEVICE="gpu")
    assert given["missing"] == []
    for name, one in given["found"].items():
        assert len(one["applied"]) == len(one["ran"]) == one["patches"], name
        assert one["renamed"] == one["lost"] == []
        assert any("generate" in call for call in one["calls"])
        assert not any(one["calls"].values()), (name, one["calls"])
