from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.patches import fake_idiom
from veomni_hook.finders import build
from veomni_hook.finders.upstream import Upstream
from veomni_hook.patches.idioms import recognise
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.cli.check.verdict import judge, nowhere

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


def forward(self: object, x: object) -> object:
    return x


def make(*targets: str, device: str | None = None) -> PatchConfig:
    config = PatchConfig("package.modeling_x", device=device)  # type: ignore[arg-type]
    config.label = f"configs:{device or 'config'}"
    for target in targets:
        config.replace_function(target, other)
    return config


def found(*configs: PatchConfig) -> list[tuple[str, str, str]]:
    return [(v.device, v.target, v.verdict) for v in judge(UPSTREAM, configs)[0]]


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
    verdicts, _ = judge(UPSTREAM, [config])
    assert [v.verdict for v in verdicts] == ["applies", "FAILS"]
    assert "not_imported" in verdicts[1].detail and verdicts[1].config == "configs:config"


def test_a_conflict_is_reported_once_for_both() -> None:
    first, second = make("one", device="gpu"), make("one")
    verdicts, _ = judge(UPSTREAM, [first, second])
    (failed,) = [v for v in verdicts if v.verdict == "FAILS"]
    assert failed.config == "configs:gpu + configs:config"


@pytest.mark.parametrize("change", ["lost", "doubled"])
def test_the_engine_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    genuine: Callable[..., object] = build.patch

    def tampered(*arguments: object, **options: object) -> object:
        patched = genuine(*arguments, **options)
        applied = patched.report.applied  # type: ignore[attr-defined]
        changed = applied[1:] if change == "lost" else (*applied, applied[0])
        return replace(patched, report=replace(patched.report, applied=changed))  # type: ignore[attr-defined, type-var]

    monkeypatch.setattr(build, "patch", tampered)
    (first, second), _ = judge(UPSTREAM, [make("one", "two")])
    assert (first.verdict, second.verdict) == ("FAILS", "applies")
    assert first.detail == f"declared 1 time, applied {0 if change == 'lost' else 2} times"


NORMS = b"""
import torch


class Norm:
    def forward(self, x):
        return self.scale * x


class Other:
    def forward(self, x):
        return self.scale / x
"""


@pytest.fixture
def idiom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "idioms", lambda *_: (fake_idiom.module(),))


def modeling(source: bytes) -> Upstream:
    return replace(UPSTREAM, data=source)


def test_routes_and_what_is_not_routed_have_verdicts(idiom: None) -> None:
    verdicts, (report,) = judge(modeling(NORMS), [], idioms=True)
    assert [(v.verdict, v.kind, v.target, v.config) for v in verdicts] == [
        ("applies", "route", "Norm.forward", "veomni_hook.patches.idioms"),
        ("missed", "scaling", "Other.forward", "veomni_hook.patches.idioms"),
    ]
    assert verdicts[0].detail.startswith("scaling/times, lines ") and "found Div" in verdicts[1].detail
    assert report.applied
    assert judge(modeling(NORMS), [])[0] == []


def test_what_is_missed_is_told_where_nothing_applies(idiom: None) -> None:
    source = NORMS.replace(b"self.scale * x", b"x")
    verdicts, _ = judge(modeling(source), [], idioms=True)
    assert [(v.verdict, v.target) for v in verdicts] == [("missed", "Other.forward")]


def test_a_route_yields_to_a_config(idiom: None) -> None:
    config = make()
    config.override_method("Norm.forward", forward)
    verdicts, _ = judge(modeling(NORMS), [config], idioms=True)
    by_kind = {v.kind: v for v in verdicts}
    assert by_kind["method_override"].verdict == "applies"
    assert by_kind["route"].verdict == "yields" and "configs:config" in by_kind["route"].detail


def test_an_idiom_that_fails_is_a_failure_and_the_configs_have_their_verdicts(idiom: None) -> None:
    source = SOURCE + b"\n\nclass Norm:\n    def forward(self):\n        return boom\n"
    verdicts, _ = judge(modeling(source), [make("one")], idioms=True)
    assert [(v.verdict, v.config) for v in verdicts] == [
        ("FAILS", "veomni_hook.patches.idioms"),
        ("applies", "configs:config"),
    ]
    assert "met boom" in verdicts[0].detail


def pattern(*targets: str) -> PatchConfig:
    config = PatchConfig("package.*", label="configs:pattern")
    for target in targets:
        config.replace_function(target, other)
    return config


def test_a_pattern_applies_where_its_targets_are() -> None:
    verdicts, _ = judge(UPSTREAM, [pattern("o*", "gone")])
    assert [(v.target, v.verdict) for v in verdicts] == [("one", "applies")]
    assert judge(modeling(b"x = 1\n"), [pattern("one")])[0] == []


def test_a_patch_of_a_pattern_that_applies_nowhere_fails() -> None:
    config = pattern("o*", "gone")
    _, reports = judge(UPSTREAM, [config])
    (failed,) = nowhere(config, reports)
    assert (failed.target, failed.verdict, failed.module) == ("gone", "FAILS", "package.*")
    assert "not apply to the one module that package.* matches" in failed.detail and failed.fix
