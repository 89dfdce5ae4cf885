"""What the observer notes of a training loop in this process, and that nothing else changes by it."""

from __future__ import annotations

import copy
import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from tests.kernels.patched_qwen3 import load, tiny_config
from veomni_hook.kernels.selection.process_choice import STATE, set_choice
from veomni_hook.tools.compare.observer import Observation, Stopped, _stop
from veomni_hook.tools.compare.plan import Plan
from veomni_hook.tools.compare.recorder import Recorder, tokens_of
from veomni_hook.tools.report.explanation import explain


@pytest.fixture
def observe(tmp_path: Path):
    """Start an observation; `found()` ends it and returns what it wrote."""
    begun: list[Observation] = []

    def begin(steps: int = 100, stop=lambda _: None) -> SimpleNamespace:
        recorder = Recorder(Plan(str(tmp_path), steps, time.time()))
        observation = Observation(recorder, stop)
        observation.begin()
        begun.append(observation)

        def found() -> dict:
            recorder.write(stopped=False)
            (file,) = tmp_path.glob("result-*.json")
            return json.loads(file.read_text())

        return SimpleNamespace(recorder=recorder, found=found)

    yield begin
    for observation in begun:
        observation.end()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory):
    return load(tmp_path_factory.mktemp("patched"))


@pytest.fixture
def kernels():
    with STATE.restored():
        set_choice("torch")
        yield


def train(model: nn.Module, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 60, (2, 16))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_same_kernels_run_and_compute_the_same(qwen3, kernels, observe) -> None:
    plain = qwen3.Qwen3ForCausalLM(tiny_config()).train()
    seen, hooked = copy.deepcopy(plain), copy.deepcopy(plain)
    losses = train(plain)
    seeing = observe()
    assert train(seen) == losses
    found = seeing.found()
    assert str(explain(seen)) == str(explain(plain))
    assert "torch (" in str(explain(seen)) and "linear_cross_entropy/next_token: torch" in str(explain(seen))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), seen.parameters(), strict=True))
    assert found["losses"] == losses
    assert found["tokens"] == [32, 32, 32]
    assert found["models"] == ["Qwen3ForCausalLM"]
    assert found["times"] == sorted(found["times"]) and found["first_call"] < found["times"][0]
    # What an observer would do at first thought: then guards refuse, and other code runs.
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    train(hooked)
    handle.remove()
    assert str(explain(hooked)) != str(explain(plain))


def test_losses_are_those_of_one_step_and_everything_is_taken_out_again(observe, tmp_path: Path) -> None:
    before = (torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step)
    seeing = observe()
    linear = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        parts = []
        for _ in range(2):  # accumulation, with a checkpoint that calls backward inside of backward
            inside = checkpoint(linear, torch.randn(2, 4, requires_grad=True), use_reentrant=True)
            loss = inside.square().mean() / 2
            loss.backward()
            parts.append(loss.item())
        torch.randn(3, requires_grad=True).square().backward(torch.ones(3))  # no scalar: no loss
        optimizer.step()
        optimizer.step()  # parameters group by group: one step
        expected.append(pytest.approx(sum(parts)))
    found = seeing.found()
    assert found["losses"] == expected
    assert found["tokens"] == [0, 0, 0]
    assert (found["optimizer"], found["optimizers"], found["backwards"]) == ("SGD", 1, 9)
    assert found["memory"] == "resident" and found["peak"] > 2**20
    assert torch.autograd.backward is not before[0]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def state() -> list[object]:
        owners = (torch.autograd, torch.optim.Optimizer, torch.amp.GradScaler, PreTrainedModel)
        return [dict(vars(owner)) for owner in owners]

    before = state()
    observation = Observation(Recorder(Plan(str(tmp_path), 1, 0.0)), lambda _: None)
    observation.begin()
    torch.amp.GradScaler("cpu")
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert state() != before
    observation.end()
    assert state() == before


def test_a_scaled_loss_is_noted_unscaled_and_a_skipped_step_is_none(observe) -> None:
    seeing = observe()
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for value in (3.0, float("inf"), 5.0):
        scaler.scale(weight * value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = seeing.found()
    assert (found["losses"], found["skipped"], found["precision"]) == ([3.0, 5.0], 1, "float32")


def test_of_two_optimizers_the_one_that_steps_most_counts(observe) -> None:
    seeing = observe()
    probe, weight = (nn.Parameter(torch.ones(())) for _ in range(2))
    first, second = (torch.optim.SGD([each], lr=0.0) for each in (probe, weight))
    for optimizer, parameter, steps in ((first, probe, 1), (second, weight, 3)):
        for step in range(steps):
            (parameter * step).backward()
            optimizer.step()
    found = seeing.found()
    assert (found["losses"], found["optimizers"]) == ([0.0, 1.0, 2.0], 2)


def test_the_script_is_stopped_after_the_last_step_also_when_it_catches_that(
    observe, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("veomni_hook.tools.compare.observer.atexit.register", lambda *_: None)
    observe(steps=2, stop=_stop)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    done = 0
    for _ in range(5):
        try:
            (weight * 1).backward()
            optimizer.step()
            done += 1
        except Stopped as stopped:
            assert stopped.code == 0
    assert done == 2
    (file,) = tmp_path.glob("result-*.json")
    found = json.loads(file.read_text())
    assert found["stopped"] and len(found["times"]) == len(found["losses"]) == 2 and found["backwards"] == 2
    assert found["profile"] == {"kept": 0.0}, "of the step behind, without a product"
    (progress,) = tmp_path.glob("progress-*")
    assert progress.stat().st_size == 2


def test_a_script_that_ends_with_the_last_step_has_no_profile(observe) -> None:
    seeing = observe(steps=2)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(2):
        (weight * 1).backward()
        optimizer.step()
        optimizer.step()  # parameters group by group
    assert torch.autograd._profiler_enabled()
    found = seeing.found()
    assert found["profile"] is None and len(found["times"]) == 2 and not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(
    ("args", "kwargs", "encoder_decoder", "expected"),
    [
        ((), {"input_ids": torch.ones(2, 8, dtype=torch.long)}, False, 16),
        ((torch.ones(2, 8, dtype=torch.long),), {}, False, 16),
        ((), {"inputs_embeds": torch.ones(2, 8, 4)}, False, 16),
        ((), {"labels": torch.ones(2, 8, dtype=torch.long)}, False, 16),
        ((torch.ones(2, 8),), {"pixel_values": torch.ones(2, 3, 4, 4)}, False, None),
        ((), {"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2, 3).long()}, True, 22),
    ],
)
def test_tokens_are_told_by_shapes(args, kwargs, encoder_decoder, expected) -> None:
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=encoder_decoder))
    assert tokens_of(model, args, kwargs) == expected


class Clock:
    """A device whose clock runs ten times as fast as the steps are noted; nobody waits for it but at the end."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def Event(self, *, enable_timing: bool):
        assert enable_timing
        clock = self

        class Event:
            def record(self) -> None:
                clock.now += 10.0
                self.at = clock.now

            def elapsed_time(self, end) -> float:
                return (end.at - self.at) * 1e3

        return Event()

    def synchronize(self) -> None:
        self.waits += 1

    def is_current_stream_capturing(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def max_memory_allocated(self, device: int) -> int:
        return 100 + device

    def get_device_name(self) -> str:
        return "a double"


def test_on_an_accelerator_its_own_clock_and_memory_count(observe, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr("veomni_hook.tools.compare.measures.accelerator.module", lambda _: clock)
    seeing = observe()
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(3):
        (weight * 1).backward()
        optimizer.step()
    assert clock.waits == 0
    found = seeing.found()
    assert clock.waits == 1
    assert [b - a for a, b in pairwise(found["times"])] == pytest.approx([10.0, 10.0])
    assert (found["memory"], found["peak"], found["device_name"]) == ("device", 201, "a double")


def compiled(qwen3, how: str) -> tuple[list[int], list[float]]:
    """Train a compiled model; return how many operations each compiled graph has, and the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = qwen3.Qwen3ForCausalLM(tiny_config(num_hidden_layers=1)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "in place":
        model.compile(backend=backend)
    called = torch.compile(model, backend=backend) if how == "module" else model
    step = lambda ids: called(input_ids=ids, labels=ids).loss  # noqa: E731
    if how == "function":
        step = torch.compile(step, backend=backend)
    losses = []
    for _ in range(2):
        loss = step(torch.randint(0, 60, (2, 16)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return graphs, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "tokens"), [("module", [32, 32]), ("in place", [32, 32]), ("function", [0, 0])]
)
def test_the_same_is_compiled(qwen3, observe, how: str, tokens: list[int]) -> None:
    plain = compiled(qwen3, how)
    seeing = observe()
    assert compiled(qwen3, how) == plain
    found = seeing.found()
    assert (found["losses"], found["tokens"]) == (plain[1], tokens)
