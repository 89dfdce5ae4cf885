"""VeOmni's loader with the hook's models, configs and processors, as docs/veomni.md registers them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.veomni.conftest import in_process
from tests.veomni.sides import config_module

FIX = "veomni_hook.patches.fixes.omni_processor_inputs"
PATCHES = """
from veomni_hook import PatchConfig

dense = PatchConfig("transformers.models.qwen3.configuration_qwen3")
omni = PatchConfig("transformers.models.qwen2_5_omni.configuration_qwen2_5_omni")
speech = PatchConfig("transformers.models.wav2vec2.processing_wav2vec2")
configs = [dense, omni, speech]


@dense.add_method("Qwen3Config.hooked")
@omni.add_method("Qwen2_5OmniConfig.hooked")
@speech.add_method("Wav2Vec2Processor.hooked")
def hooked(self):
    return True
"""


def test_what_it_builds_is_hooked(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (tmp_path / "registry_patches.py").write_text(PATCHES)
    config = config_module("qwen3_moe", "gpu")
    subprocess.run(
        [sys.executable, "-m", "veomni_hook", "migrate", config, "-o", "qwen3_moe_patches.py"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    patches = f"qwen3_moe_patches,registry_patches,{FIX}"
    facts = in_process(cache, "loaded", configs=[], PATCHES=patches)
    assert facts["blocks"] == 2
    assert facts["class"] == "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM"
    assert facts["attached"] == [
        "_convert_fqn_to_index_mapping", "_convert_lora_targets_to_parameters", "_create_checkpoint_tensor_converter"
    ]  # fmt: skip
    assert facts["same weights"]
    assert {"moe_router", "rms_norm", "rotary"} <= {*facts["ran"]}
    assert len(facts["differences"]) == 3
    for found in facts["differences"]:
        for name, difference in found.items():  # ours computes logits when they are read, VeOmni's has none
            assert name == "logits" if isinstance(difference, list) else difference["close"], (
                name,
                difference,
            )
    assert facts["dense"] == "transformers.models.qwen3.modeling_qwen3"
    models = "transformers.models"
    assert facts["config of ours"] == [f"{models}.qwen3.configuration_qwen3", True]
    home = "veomni.models.transformers.qwen2_5_omni.configuration_qwen2_5_omni"
    assert facts["config of VeOmni"] == [home, True]
    for name in ("processor without an entry", "processor of ours"):
        assert facts[name] == [f"{models}.wav2vec2.processing_wav2vec2", True]
    assert facts["processor of the document"] == [f"{models}.qwen2_5_omni.processing_qwen2_5_omni", True]


@pytest.mark.parametrize(
    ("begin", "named", "said"),
    [
        ("", "qwen3", "the hook is not active"),
        ("import veomni_hook.install", "qwen33", "VeOmni has no models of type qwen33"),
    ],
)
def test_what_cannot_be_registered(begin: str, named: str, said: str, tmp_path: Path) -> None:
    code = f"{begin}\nfrom veomni_hook.integrations.veomni import register_models\nregister_models({named!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr
