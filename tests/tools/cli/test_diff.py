from __future__ import annotations

from .conftest import TINY, Command


def test_the_difference_is_the_patch_and_nothing_else(tiny: Command) -> None:
    done = tiny("diff", "tiny")
    changed = [line for line in done.out.splitlines()[2:] if line[0] in "+-"]
    assert changed == [
        "-        # upstream's own comment",
        "-        return double(x) + self.bias",
        "+        # Patch.1: the point of it all",
        "+        return double(x) + self.bias + 100  # noqa: F821",
    ]
    assert (done.status, done.err) == (0, "")
    found = tiny("diff", "tiny", "--json").json
    assert (found["module"], found["diff"]) == (TINY, done.out)
    assert (found["added"], found["removed"]) == (2, 2)


def test_one_config_alone(tiny: Command) -> None:
    done = tiny("diff", "--config", "tiny_config:pair_b", VEOMNI_PATCHES=None)
    assert '+    return "patched b"\n' in done.out and done.status == 0


def test_no_patch_is_no_output(tiny: Command) -> None:
    done = tiny("diff", "auto")
    assert (done.status, done.out) == (0, "")
    assert "no patch applies" in done.err
    none = tiny("diff", "auto", "--json")
    assert (none.json["diff"], none.json["added"], none.err) == ("", 0, "")
    assert "no patch applies" in none.json["reason"]


def test_the_installed_qwen3(veomni: Command) -> None:
    done = veomni("diff", "qwen3")
    assert done.status == 0 and done.out.startswith("--- ")
    assert "+veomni_rms_norm_cast_before_weight = " in done.out
    assert "[PATCHED" not in done.out and "+from transformers." not in done.out
