"""`cache warm --kernels`: how many layers it builds, what its step runs, what it counts, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from veomni_hook import accelerator
from veomni_hook.tools.cli.cache import warming
from veomni_hook.tools.cli.cache.fewer_layers import shortened
from veomni_hook.tools.cli.usage import UsageError

from ..conftest import REPOSITORY, Command, Done

pytest.importorskip("triton")

#: Of the type's default config. Layers that are alike count once, also where a number in each tells them apart.
NUMBERS = {
    "qwen3": {"model.layers": [1, 32]},  # as many heads as layers
    "llama": {"model.layers": [1, 32]},
    "gemma3_text": {"model.layers": [6, 26]},  # the sixth has no window
    "gemma3": {"model.language_model.layers": [6, 26]},  # counted in a part of the config
    "gpt_oss": {"model.layers": [2, 36]},
    "qwen3_next": {"model.layers": [4, 48]},  # the fourth is no linear attention
    "deepseek_v3": {"model.layers": [4, 61]},  # three without experts
    "jamba": {"model.layers": [5, 32]},
    "gpt_neo": {"transformer.h": [2, 24]},
    "gpt_neox_japanese": {"gpt_neox_japanese.layers": [2, 32]},  # the last one has a bias
    "longcat_flash": {"model.layers": [1, 28]},  # two numbers in a layer
    "t5": {"decoder.block": [2, 6]},  # another number counts the encoder's
    "bert": {},  # no decoder: it stays whole
}


@pytest.fixture(scope="module")
def facts(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.cli.cache.facts_of_warming", str(tmp_path_factory.mktemp("models"))],
        cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NUMBERS)
def test_as_few_layers_as_have_every_structure(name: str, facts: Any) -> None:
    found = facts["types"][name]
    found["numbers"].pop("encoder.block", None)  # older releases do not say that it is no decoder
    assert found["numbers"] == NUMBERS[name]
    assert found["lengths"] in ([few for few, _ in NUMBERS[name].values()], [2, 2]) and found["unchanged"]
    assert found["kinds"] in ([], [few for few, _ in NUMBERS[name].values()])


def test_a_number_without_a_model_is_passed_over() -> None:
    config = SimpleNamespace(sub_configs={}, layers=9)

    def build(config: SimpleNamespace) -> nn.Module:
        assert config.layers > 2, "there is no smaller model"
        return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(config.layers))})

    fewer, numbers = shortened(config, build)
    assert (fewer.layers, numbers, config.layers) == (3, {"layers": (3, 9)}, 9)


def test_a_config_of_a_folder_or_a_file(facts: Any) -> None:
    for found in facts["saved"].values():
        assert found["numbers"] == {"model.layers": [1, 3]} and found["kinds"] == [1]


def test_a_window_is_a_difference(facts: Any) -> None:
    assert facts["sliding"]["numbers"] == {"model.layers": [3, 4]}


def test_a_step_runs_kernels_and_compiles_none_on_a_cpu(facts: Any) -> None:
    step = facts["small"]
    assert step["layers"] == {"model.layers": [1, 3]} and step["tokens"] == [16, 32]
    assert (step["compiled"], step["found"]) == (0, 0)
    assert 0 <= step["seconds"] < 600  # tenths: a fast machine takes none
    assert {"rms_norm", "rotary"} <= {*step["ran"]}
    assert step["calls"] == 2 * len(step["tokens"]), (
        "a training step of one sequence and of two, for each length"
    )
    assert step["built"] == 1 and step["use_cache"] is False
    assert step["dtype"] == "torch.bfloat16" and not step["gradients"]


def test_layers_of_two_kinds_run(facts: Any) -> None:
    assert "moe_router" in facts["hybrid"]["ran"] and facts["hybrid"]["built"] == 4
    assert facts["hybrid"]["tokens"] == [48], "as many as it has positions"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ("'qwen33' is no model type", "nearest names: qwen3")),
        ("empty", ("its config cannot be read", "empty", "config.json")),
        ("odd", ("its config cannot be read", "of_nobody")),
        ("no text", ("no language model for ViTConfig",)),
        ("two texts", ("name the folder of a model",)),
        ("impossible", ("makes no model of this config: TypeError", "LlamaConfig")),
        ("memory", ("too little memory", "1 of 3 layers", "32 tokens", "--tokens 1024")),
    ],
)
def test_an_error_says_what_to_do(case: str, words: tuple[str, ...], facts: Any) -> None:
    text = facts["errors"][case]
    assert text.startswith("UsageError: ") and all(word in text for word in words), text
    assert text.count("\n") == 2


def test_without_a_gpu(veomni: Command) -> None:
    done = veomni("cache", "warm", "--kernels", "qwen3", CUDA_VISIBLE_DEVICES="")
    assert (done.status, done.out) == (2, "")
    assert "no GPU" in done.err and "on the machine that trains" in done.err and "in the job" in done.err


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "best", lambda: "cuda")
    assert warming.gpu() == "cuda"
    monkeypatch.setattr(warming, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="no Triton here"):
        warming.gpu()


ON_CPU = """
import sys
from veomni_hook.tools.cli.app import main
from veomni_hook.tools.cli.cache import warming
warming.gpu = lambda: "cpu"
main()
"""
CONFIG = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture
def on_cpu(environ: dict[str, str], tmp_path: Path) -> Command:
    """The command on a machine whose CPU counts as a GPU, in a folder with a config."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(*arguments: str, **variables: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-c", ON_CPU, "cache", "warm", *arguments],
            cwd=tmp_path, env={**environ, **variables}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def test_what_it_reports(on_cpu: Command, tmp_path: Path) -> None:
    done = on_cpu("--kernels", ".", "--tokens", "16, 32", "--json", TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.status == 0, done.err
    assert done.json.pop("seconds") > 0
    assert {**done.json, "seconds": 0} == {
        "model": ".", "layers": {"model.layers": [1, 3]}, "tokens": [16, 32], "compiled": 0, "found": 0, "seconds": 0,
        "cache": str(tmp_path / "triton"),
    }  # fmt: skip
    shown = on_cpu("--kernels", "config.json").out
    assert "1 of 3 (model.layers)" in shown and "Triton's cache" in shown
    rows = {line.rsplit("  ", 1)[0].strip(): line.split()[-1] for line in shown.splitlines()}
    assert rows["tokens"] == "4096" and rows["kernels compiled"] == rows["kernels found"] == "0"


def test_the_settings_in_force_count(on_cpu: Command) -> None:
    off = on_cpu("--kernels", ".", VEOMNI_HOOK="0")
    assert off.status == 2 and "the hook is switched off" in off.err
    wrong = on_cpu("--kernels", ".", "--tokens", "16", VEOMNI_KERNELS="rms_norm=nobodys")
    assert wrong.status == 2 and "nobodys" in wrong.err


@pytest.mark.parametrize("says", [True, False])
def test_kernels_are_counted(says: bool, tmp_path: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.cli.cache.facts_of_counts", *(["says"] if says else [])],
        cwd=REPOSITORY, env={**environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRITON_INTERPRET": "0"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, again = json.loads(done.stdout)
    assert first == {"compiled": 2, "found": 0 if says else None, "cache": str(tmp_path / "triton")}
    assert again == {"compiled": 1, "found": 2 if says else None, "cache": str(tmp_path / "triton")}
