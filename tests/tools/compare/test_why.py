"""What a comparison says about a step that is not faster, and the profile of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from tests.tools.compare.made import STEADY, run
from veomni_hook.tools.cli.compare import rows_of
from veomni_hook.tools.compare import profile
from veomni_hook.tools.compare.page import page_of
from veomni_hook.tools.compare.profile import StepProfile, covered
from veomni_hook.tools.compare.report import report_of
from veomni_hook.tools.report.page import text

SAID = "In training, 1 of 2 places run fused kernels."
ON_CPU = "Without the hook, matrix products, convolutions and attention take 80 % of a step."


def why(ratio: float, without: dict | None, hooked: dict | None) -> str:
    runs = []
    for turn in (1, 2):
        runs += [
            run(False, turn, STEADY, [2.0], profile=without),
            run(True, turn, [each * ratio for each in STEADY], [2.0], profile=hooked, explained=[SAID]),
        ]
    report = report_of(runs, ["train.py"], 20, 3)
    assert all(text(sentence) in page_of(report, rows_of(report)) for sentence in report["why"])
    return " ".join(report["why"])


@pytest.mark.parametrize(
    ("ratio", "without", "hooked", "said"),
    [
        (0.9, {"kept": 0.8}, {"kept": 0.8}, ""),
        (1.0, {"kept": 0.8}, {"kept": 0.8}, f"{ON_CPU} Most kernels leave these as they are, and shorten only the other 20 %. {SAID}"),
        (1.0, {"kept": 2.0}, None, "take 100 % of a step."),
        (1.0, {"kept": 0.3, "busy": 0.5}, None, "take 60 % of the device's time. Most"),
        (1.0, None, {"kept": 0.3, "busy": 0.5}, "the device waits for the host in 50 % of a step, so"),
        (2.0, None, {"kept": 0.3, "busy": 1.9}, "With the hook, the device computes in 95 % of a step."),
        (1.2, None, None, SAID),
    ],
    ids=["faster", "on a CPU", "more than all", "on a GPU", "waiting", "busy", "no profile"],
)  # fmt: skip
def test_why_it_is_not_faster(ratio, without, hooked, said: str) -> None:
    found = why(ratio, without, hooked)
    assert said in found and bool(said) is bool(found) is found.endswith(SAID)


def test_time_in_which_streams_overlap_counts_once() -> None:
    assert covered([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert covered([]) == 0.0


def test_what_ran_on_the_device_are_neither_operators_nor_ranges() -> None:
    def event(device: DeviceType, begin: float, *, annotation: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=begin, end=begin + 1)
        return SimpleNamespace(device_type=device, time_range=span, is_user_annotation=annotation)

    events = [
        event(DeviceType.CPU, 0.0),
        event(DeviceType.CUDA, 2.0),
        event(DeviceType.CUDA, 4.0, annotation=True),
    ]
    assert profile._spans(events) == [(2.0, 3.0)]


@pytest.mark.parametrize(
    ("compute", "kept"),
    [
        (lambda x: x @ x, True),
        (lambda x: torch.nn.functional.linear(x, x, x[0]), True),
        (lambda x: torch.bmm(x[None], x[None]), True),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3), True),
        (lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]), True),
        (lambda x: (x * x).cumsum(0).cummax(0), False),
        (lambda x: torch.nn.functional.rms_norm(x, (64,)).softmax(-1), False),
    ],
)
def test_a_profile_of_a_step_knows_products(compute, kept: bool) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    step = StepProfile("cpu")
    found = compute(x)
    (found if isinstance(found, torch.Tensor) else found[0]).sum().backward()
    assert (step.end()["kept"] > 0) is kept


def test_a_script_that_profiles_itself_is_left_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert StepProfile("cpu").end() is None
    assert StepProfile("meta").end() is None
