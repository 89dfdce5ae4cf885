from __future__ import annotations

from pathlib import Path

from ..conftest import TINY, Command, starter

MANY_MISTAKES = f"""
from veomni_hook import PatchConfig

config = PatchConfig("{TINY}")

@config.override_method("TinyNorm.forward")
def forward(self, x):
    return x

@config.override_method("TinyNorm.forwrad")
def forwrad(self, x):
    return x

@config.replace_function("tiny_function")
def tiny_function():
    return 1
"""


def test_every_spec_applies_to_the_installed_transformers(veomni: Command) -> None:
    done = veomni("check", "--json")
    assert done.status == 0, done.out + done.err
    assert {verdict["verdict"] for verdict in done.json} <= {"applies"}


def test_a_family_of_the_installed_transformers_has_its_routes(veomni: Command) -> None:
    done = veomni("check", "qwen3", "--json")
    assert done.status == 0, done.out + done.err
    applies = {(v["target"], v["detail"].partition(",")[0]) for v in done.json if v["verdict"] == "applies"}
    assert {
        ("Qwen3RMSNorm.forward", "rms_norm/cast_before_weight"),
        ("Qwen3Attention.forward", "rotary/half_split"),
        ("Qwen3ForCausalLM.forward", "linear_cross_entropy/next_token"),
    } <= applies
    said = {detail.partition("/")[0] for target, detail in applies if target == "Qwen3Attention.forward"}
    assert said == {"rotary", "qk_norm_rotary"}
    assert any(target == "Qwen3MLP.forward" and detail.startswith("gated_mlp/") for target, detail in applies)
    assert {v["config"] for v in done.json} == {"veomni_hook.patches.idioms"}


def test_the_report_of_what_applies(tiny: Command) -> None:
    done = tiny("check")
    assert done.status == 0
    lines = done.out.splitlines()
    row = next(line for line in lines if "TinyNorm.forward" in line)
    assert row.split()[0] == "applies" and "tiny_config:config" in row
    assert "4 apply" in lines[-1]


def test_lines_are_those_of_the_dump(tiny: Command) -> None:
    (verdict,) = [v for v in tiny("check", "tiny", "--json").json if v["target"] == "TinyNorm.forward"]
    first, last = map(int, verdict["detail"].removeprefix("lines ").split("-"))
    shown = tiny("dump", "tiny").out.splitlines()[first - 1 : last]
    assert "[PATCHED METHOD] TinyNorm.forward" in shown[0] and "+ 100" in shown[-1]


def test_a_built_in_spec_of_another_release_is_absent_not_wrong(
    tiny_environ: dict[str, str], tmp_path: Path
) -> None:
    wanted = starter({**tiny_environ, "VEOMNI_REMOTE_CODE": "1"}, tmp_path)
    found = [v for v in wanted("check", "--json").json if v["verdict"] == "absent"]
    assert {verdict["module"] for verdict in found} == {"transformers.dynamic_module_utils"}


def test_built_in_specs_that_the_settings_do_not_want_are_left_out(tiny: Command) -> None:
    assert [v for v in tiny("check", "--json").json if v["verdict"] == "absent"] == []


def test_targets_narrow_the_check(tiny: Command) -> None:
    assert {v["module"] for v in tiny("check", "tiny", "--json").json} == {TINY}
    unknown = tiny("check", "tinny")
    assert unknown.status == 2 and "tiny" in unknown.err


def test_every_mistake_is_named_with_its_fix(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text(MANY_MISTAKES)
    done = tiny("check", "--config", "mistakes", "--json", VEOMNI_PATCHES=None)
    assert done.status == 1
    verdicts = {v["target"]: v for v in done.json if v["module"] == TINY}
    assert {target: v["verdict"] for target, v in verdicts.items()} == {
        "TinyNorm.forward": "applies",
        "TinyNorm.forwrad": "FAILS",
        "tiny_function": "FAILS",
    }
    assert "forward" in verdicts["TinyNorm.forwrad"]["detail"] + verdicts["TinyNorm.forwrad"]["fix"]
    assert all(v["fix"] for v in verdicts.values() if v["verdict"] == "FAILS")
    readable = tiny("check", "--config", "mistakes", VEOMNI_PATCHES=None)
    assert readable.status == 1
    assert readable.out.count("\n  fix: ") == 2 and readable.out.endswith(" 2 FAIL\n")


def test_two_configs_on_one_target_conflict(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(
        f"from veomni_hook import PatchConfig\nconfig = PatchConfig('{TINY}')\n"
        "@config.override_method('TinyNorm.forward')\ndef forward(self, x):\n    return x\n"
    )
    done = tiny("check", "tiny", "--config", "second", "--json")
    assert done.status == 1
    (failed,) = [v for v in done.json if v["verdict"] == "FAILS"]
    assert "second" in failed["config"] and "tiny_config" in failed["config"]
    assert "TinyNorm.forward" in failed["target"] + failed["detail"]


def test_a_config_without_a_module_or_without_an_import(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(
        "from veomni_hook import PatchConfig\n"
        "config = PatchConfig('transformers.models.gone.modeling_gone')\n"
    )
    done = tiny("check", "--config", "lost", "--config", "no_such_config", "--json", VEOMNI_PATCHES=None)
    assert done.status == 1
    failed = {v["config"]: v["detail"] for v in done.json if v["verdict"] == "FAILS"}
    assert "not installed" in failed["lost:config"]
    assert "cannot be imported" in failed["no_such_config"]
