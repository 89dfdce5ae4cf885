"""What `explain` says of the batch-invariant mode."""

from types import SimpleNamespace

import pytest
from torch import nn

from veomni_hook.batch_invariance import mode
from veomni_hook.tools.report.batch_invariance import notes_on_invariance


class Model(nn.Module):
    def __init__(self, implementation, *modules):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=implementation)
        self.parts = nn.ModuleList(modules)


def row(op, backend):
    return SimpleNamespace(op=op, kind="Layer", backend=backend, reason="why")


@pytest.fixture
def is_on(monkeypatch):
    monkeypatch.setattr(mode, "_on", True)


def test_nothing_without_the_mode():
    assert list(notes_on_invariance(Model("eager"), [row("rms_norm", "eager")], "cuda")) == []


def test_no_doubt(is_on):
    rows = [row("rms_norm", "triton"), row("rotary", "eager")]
    model = Model("sdpa", nn.Conv2d(3, 8, 4, stride=4))
    assert list(notes_on_invariance(model, rows, "cuda")) == [
        "batch-invariant: rows of a forward pass have the same bits in any batch"
    ]


@pytest.mark.parametrize(
    ("model", "rows", "device", "note"),
    [
        (Model("sdpa"), [row("rms_norm", "eager")], "cuda", "rms_norm in Layer: upstream's code (why)"),
        (Model("sdpa"), [row("causal_conv", "eager")], "cpu", "causal_conv in Layer: upstream's code (why)"),
        (Model("eager"), [], "cpu", "attention: attn_implementation='eager'; only 'sdpa' is"),
        (Model("sdpa", nn.Conv1d(4, 4, 3)), [], "cpu", "Conv1d: torch's convolution"),
    ],
)
def test_doubts(is_on, model, rows, device, note):
    first, *others = notes_on_invariance(model, rows, device)
    assert first.endswith("except where one of these computes them")
    assert others == [f"not batch-invariant: {note}"]


def test_upstream_rows_on_a_cpu(is_on):
    assert len(list(notes_on_invariance(Model("sdpa"), [row("rms_norm", "eager")], "cpu"))) == 1
