from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from veomni_hook.cli.verdict import judge
from veomni_hook.finders import build
from veomni_hook.finders.pipeline import Upstream
from veomni_hook.patches.spec import PatchConfig

SOURCE = b"""
def one():
    return 1


def two():
    return 2


class Model:
    def forward(self):
        return one() + two()
"""
UPSTREAM = Upstream("package.modeling_x", "/package/modeling_x.py", SOURCE, "package", "1.0")


def other() -> int:
    return 3


def make(*targets: str, device: str | None = None) -> PatchConfig:
    config = PatchConfig("package.modeling_x", device=device)  # type: ignore[arg-type]
    config.label = f"configs:{device or 'config'}"
    for target in targets:
        config.replace_function(target, other)
    return config


def found(*configs: PatchConfig) -> list[tuple[str, str, str]]:
    return [(v.device, v.target, v.verdict) for v in judge(UPSTREAM, configs)]


def test_each_patch_has_its_verdict() -> None:
    assert found(make("one", "two")) == [("any", "one", "applies"), ("any", "two", "applies")]


def test_every_failing_patch_is_found_and_the_good_one_is_cleared() -> None:
    assert found(make("one", "tow", "three")) == [
        ("any", "one", "applies"),
        ("any", "tow", "FAILS"),
        ("any", "three", "FAILS"),
    ]


def test_devices_are_judged_apart() -> None:
    assert found(make("one", device="gpu"), make("oen", device="npu")) == [
        ("gpu", "one", "applies"),
        ("npu", "oen", "FAILS"),
    ]


def test_a_mistake_of_the_config_as_a_whole_is_its_own_verdict() -> None:
    config = make("one")
    config.drop_import_names("not_imported")
    verdicts = judge(UPSTREAM, [config])
    assert [v.verdict for v in verdicts] == ["applies", "FAILS"]
    assert "not_imported" in verdicts[1].detail and verdicts[1].config == "configs:config"


def test_a_conflict_is_reported_once_for_both() -> None:
    first, second = make("one", device="gpu"), make("one")
    verdicts = judge(UPSTREAM, [first, second])
    (failed,) = [v for v in verdicts if v.verdict == "FAILS"]
    assert failed.config == "configs:gpu + configs:config"


@pytest.mark.parametrize("change", ["lost", "doubled"])
def test_the_engine_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    genuine: Callable[..., object] = build.patch

    def tampered(*arguments: object) -> object:
        patched = genuine(*arguments)
        applied = patched.report.applied  # type: ignore[attr-defined]
        changed = applied[1:] if change == "lost" else (*applied, applied[0])
        return replace(patched, report=replace(patched.report, applied=changed))  # type: ignore[attr-defined, type-var]

    monkeypatch.setattr(build, "patch", tampered)
    first, second = judge(UPSTREAM, [make("one", "two")])
    assert (first.verdict, second.verdict) == ("FAILS", "applies")
    assert first.detail == f"declared 1 times, applied {0 if change == 'lost' else 2} times"
