from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from veomni_hook.errors import KernelError
from veomni_hook.kernels import problem as of_one
from veomni_hook.kernels.linear_cross_entropy import bench as linear_cross_entropy
from veomni_hook.kernels.linear_cross_entropy import bench_distillation
from veomni_hook.kernels.linear_cross_entropy import bench_grpo as linear_cross_entropy_grpo
from veomni_hook.kernels.moe_experts import bench as moe_experts
from veomni_hook.kernels.problem import Problem, Side, formula, peer
from veomni_hook.kernels.rotary import bench as rotary
from veomni_hook.kernels.rotary.reference import half_split
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.tools.bench import record, run
from veomni_hook.tools.bench.cases import benchmarks, problems
from veomni_hook.tools.bench.run import Row, measured
from veomni_hook.tools.bench.timing import peak_bytes
from veomni_hook.tools.cli.bench import bench
from veomni_hook.tools.significance import compare


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round, and limits that need no measurement."""
    monkeypatch.setitem(run.ROUNDS, "cpu", 1)
    monkeypatch.setattr(run, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(run, "product", lambda device, dtype: (lambda: None, 1))
    monkeypatch.setattr(record, "bandwidth", lambda device: 1e9)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not\nhere")


def elementwise() -> Problem:
    x = torch.randn(64, 8)
    return Problem(
        op="double",
        shape="64 x 8",
        leaves=[x],
        sides={"eager": double, "peer": fail, "ours": double},
        limit="bytes",
        work={"forward": 2 * x.nbytes, "backward": 2 * x.nbytes, "turned": 2 * x.nbytes},
        incoming={"backward": [torch.ones_like(x)], "turned": [torch.ones(8, 64).t()]},
        spoils=frozenset({"ours"}),
    )


def test_every_part_of_every_side_and_why_one_is_missing() -> None:
    rows = list(measured([elementwise()], "cpu"))
    assert [row.part for row in rows] == ["failed", "forward", "backward", "turned"]
    assert rows[0].failed == {"peer": "ValueError: not"}
    for row in rows[1:]:
        assert row.milliseconds.keys() == row.share.keys() == {"eager", "ours"}
        assert all(share > 0 for share in row.share.values())
        assert {side: found.pairs for side, found in row.against.items()} == {"ours": 1}


def test_a_step_has_a_peak_that_counts_the_gradient() -> None:
    weight = torch.randn(1000, 1000)
    problem = Problem(
        op="sum", shape="1000 x 1000", leaves=[weight], sides={"eager": torch.sum}, limit="flops",
        work={"step": weight.numel()},
    )  # fmt: skip
    first, second = (row.peak["eager"] for _ in range(2) for row in measured([problem], "cpu"))
    assert weight.nbytes <= first < 1.1 * weight.nbytes
    assert second == first  # although there is a gradient already


def test_a_side_without_a_backward_takes_part_in_the_forward() -> None:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no backward here")

    problem = dataclasses.replace(elementwise(), sides={"eager": double, "peer": Forward.apply})
    rows = list(measured([problem], "cpu"))
    assert [row.part for row in rows] == ["failed", "forward", "backward", "turned"]
    assert rows[0].failed == {"peer": "RuntimeError: no backward here"}
    assert [{*row.milliseconds} for row in rows[1:]] == [{"eager", "peer"}, {"eager"}, {"eager"}]


def test_a_step_from_a_gradient_that_is_given() -> None:
    problem = dataclasses.replace(elementwise(), work={"forward": 1024, "step": 4096})
    rows = list(measured([problem], "cpu"))
    assert [row.part for row in rows] == ["failed", "forward", "step"]
    assert rows[-1].work == 4096 and rows[-1].peak["ours"] >= 2 * problem.leaves[0].nbytes
    assert not rows[1].peak


def test_a_share_of_its_own_products() -> None:
    turns: list[str] = []

    def side(weight: torch.Tensor) -> torch.Tensor:
        turns.append("side")
        return weight.sum()

    def products(weight: torch.Tensor) -> torch.Tensor:
        turns.append("products")
        return weight @ weight

    problem = Problem(
        op="sum", shape="8 x 8", leaves=[torch.randn(8, 8)], sides={"ours": side}, limit="products",
        work={"step": 1}, products=products,
    )  # fmt: skip
    (row,) = measured([problem], "cpu")
    assert row.milliseconds.keys() == row.share.keys() == row.peak.keys() == {"ours"}
    assert row.products is not None and row.products > 0
    assert row.share["ours"] == row.products / row.milliseconds["ours"]
    assert turns == ["side", *["products", "side"] * 2, "side"]  # able; warm, timed; the peak


@pytest.mark.parametrize(("vocab", "width"), [(9, 16), (16, 16)])
def test_the_products_of_the_loss_are_those_of_its_step(
    vocab: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy, "_CPU", ((6, 4, vocab),))
    problem = next(iter(linear_cross_entropy.problems("cpu", quick=True)))
    assert problem.limit == "products" and problem.products is not None
    x, weight = (leaf.requires_grad_() for leaf in problem.leaves)
    with FlopCounterMode(display=False) as counter:
        to_x, to_weight = problem.products(x, weight)
    assert counter.get_total_flops() == 6 * 6 * 4 * width
    assert (to_x.shape, to_weight.shape) == (x.shape, (width, 4)) and not to_x.requires_grad


def test_a_peak_is_above_what_was_there_before() -> None:
    held = torch.ones(1 << 20)
    assert held.nbytes <= peak_bytes(lambda: held + 1, "cpu") < held.nbytes + 1000


#: Benchmarks whose upstream code is a family's that not every release has.
FAMILY = {"gated_delta_rule_channels": "kimi_linear"}


@pytest.mark.parametrize("op", benchmarks())
def test_every_op_has_problems_whose_sides_agree(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(op.startswith(name) for name in registry.ops())
    if (family := FAMILY.get(op)) and find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"this release has no {family}")
    module = import_module(benchmarks()[op])
    monkeypatch.setattr(module, "_CPU", (small(module._CPU[0]),))
    found = list(problems(op, "cpu"))
    assert found
    for problem in found:
        # Some sides compute less, to be compared in time.
        sides = {n: side for n, side in problem.sides.items() if n != "compile" and "without" not in n}
        assert "eager" in sides
        agree(problem, sides)
        whole = {"forward", "step"} if problem.incoming else {"step"}
        assert problem.work.keys() in ({"forward", *problem.incoming}, whole)
        assert not problem.absent


def small(case: tuple[int | str, ...]) -> tuple[int | str, ...]:
    return tuple(16 if isinstance(size, int) and size > 8 else size for size in case)


def agree(problem: Problem, sides: Mapping[str, Side]) -> None:
    """Compares results, and gradients where some are given."""
    found = {}
    for name, side in sides.items():
        leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.leaves]
        results = side(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        incoming = next(iter(problem.incoming.values()), None)
        found[name] = (*results, *torch.autograd.grad(results, leaves, incoming))
    for results in found.values():
        for ours, upstream in zip(results, found["eager"], strict=True):
            torch.testing.assert_close(ours, upstream, rtol=2e-2, atol=5e-2)


def test_ligers_rotation_is_the_one_that_overwrites() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = (torch.randn(1, 4, heads, 16, device=device).transpose(1, 2) for heads in (3, 2))
    cos, sin = (table.float() for table in rotary.tables(4, 16, device))
    expected = half_split(q, k, cos, sin)
    turned = rotary.overwriting(q, k, cos, sin)
    torch.testing.assert_close(turned, expected)
    assert turned[0].data_ptr() == q.data_ptr()


@pytest.mark.parametrize("op", ["rms_norm_gated", "rms_norm_rounded", "layer_norm"])
def test_every_variant_of_a_norm_can_be_measured(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = import_module(benchmarks()[op])
    for sizes in ("_ACCELERATOR", "_CPU"):
        monkeypatch.setattr(module, sizes, tuple(map(small, module._ACCELERATOR)))
    kernels = {
        kernel.variant: kernel
        for kernel in registry.kernels("layer_norm" if op == "layer_norm" else "rms_norm")
        if kernel.backend == "triton"
    }
    monkeypatch.setattr(
        of_one, "beside", lambda _, variant, device: {"ours": load_attribute(kernels[variant].load)}
    )
    found = list(problems(op, device))
    assert len(found) == len(module._ACCELERATOR)
    for problem in found:
        agree(problem, {name: problem.sides[name] for name in ("eager", "ours")})


def test_a_peer_that_is_not_installed_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_one, "find_spec", lambda name: None)
    _, absent = peer("cuda", "quack", double)
    assert absent == {"quack": "quack-kernels is not installed"}
    problem = dataclasses.replace(elementwise(), absent=absent, sides={"eager": double})
    rows = list(measured([problem, problem], "cpu"))
    assert [row.failed for row in rows if row.part == "absent"] == [absent]
    assert len(rows) == 7


def test_a_peer_is_a_side_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_one, "find_spec", lambda name: object())
    assert peer("cuda", "quack", double) == ({"quack": double}, {})
    assert peer("cuda", "quack", "it has none") == ({}, {"quack": "it has none"})
    assert peer("cpu", "quack", double) == ({}, {})


def test_sonicmoe_is_a_side_of_a_block_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_one, "find_spec", lambda name: None)
    assert moe_experts.sonic("cuda", 2) == ({}, {"sonic": "sonic-moe is not installed"})
    assert moe_experts.sonic("cpu", 2) == ({}, {})
    monkeypatch.setattr(moe_experts, "_CPU", ((16, 32, 16, 4, 2, 0),))
    assert not any("router" in problem.shape for problem in moe_experts.problems("cpu", quick=True))
    monkeypatch.setattr(of_one, "find_spec", lambda name: object())
    sides, absent = moe_experts.sonic("cuda", 2)
    assert [*sides] == ["sonic"] and not absent


def test_a_block_is_the_router_and_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def block(top_k: int, *leaves: torch.Tensor) -> torch.Tensor:
        return moe_experts._block(formula("moe_router", "softmax_topk"), moe_experts.upstream, top_k, *leaves)

    monkeypatch.setattr(moe_experts, "sonic", lambda device, top_k: ({"sonic": partial(block, top_k)}, {}))
    (problem,) = moe_experts.blocks(device, [(16, 32, 16, 4, 2)])
    assert "with the router" in problem.shape and {"eager", "sonic"} <= {*problem.sides}
    assert problem.work["step"] == 3 * 6 * 16 * 2 * 32 * 16
    kernel = load_attribute(
        next(
            one for one in registry.kernels("moe_experts") if (one.backend, one.variant) == ("torch", "gated")
        ).load
    )
    ours = partial(moe_experts._block, formula("moe_router", "softmax_topk"), kernel, 2)
    agree(problem, {"eager": problem.sides["eager"], "ours": ours, "sonic": problem.sides["sonic"]})


def test_the_table_and_the_record(tmp_path: Path) -> None:
    row = Row(
        *("op", "step", "float32", "4 x 4", "bytes", 8),
        milliseconds={"eager": 1.5, "ours": 1.0, "peer": 1.0},
        share={"eager": 0.5},
        peak={"eager": 3 << 20},
        against={"ours": compare([[1.5] * 6], [[1.0] * 6]), "peer": compare([[1.5]], [[1.0]])},
    )
    assert record.cells(row, ["eager", "ours", "peer", "other"]) == [
        "op",
        "step",
        "float32",
        "4 x 4",
        "1.500 ms, 50.0 %, 3 MiB",
        "1.000 ms, faster",
        "1.000 ms",
        "-",
    ]
    facts = record.described("op", "cpu", [row])
    record.write(facts, tmp_path / "deep" / "record.json")
    found = json.loads((tmp_path / "deep" / "record.json").read_text())
    assert found["rows"][0]["milliseconds"]["eager"] == 1.5
    assert found["rows"][0]["against"]["ours"]["verdict"] == "faster"
    assert found["unfinished"] == []
    assert {"device", "torch", "date", "command", "copy_bytes_per_second"} <= found.keys()


def test_a_record_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    record.write({"rows": [1]}, out)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record.write({"rows": [1, 2]}, out)
    assert json.loads(out.read_text()) == {"rows": [1]}


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(op: str, device: str, *, quick: bool) -> Iterator[Problem]:
        yield dataclasses.replace(elementwise(), op=op, sides={"eager": double})
        if op == "rotary":
            interrupted()

    monkeypatch.setattr("veomni_hook.tools.bench.cases.problems", of)
    out = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        bench(["rms_norm", "rotary", "gated_mlp"], "cpu", out)
    found = json.loads(out.read_text())
    assert found["unfinished"] == ["rotary", "gated_mlp"]
    assert [row["op"] for row in found["rows"]] == ["rms_norm"] * 3 + ["rotary"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    bench(["rms_norm"], "cpu", out)
    assert json.loads(out.read_text())["unfinished"] == []


def test_only_some_implementations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(op: str, device: str, *, quick: bool) -> Iterator[Problem]:
        problem = elementwise()
        absent = {"peer": "it is not installed"}
        yield dataclasses.replace(problem, op=op, sides={"eager": double, "ours": double}, absent=absent)

    monkeypatch.setattr("veomni_hook.tools.bench.cases.problems", of)
    out = tmp_path / "record.json"
    bench(["rms_norm"], "cpu", out, side=["ours"])
    rows = json.loads(out.read_text())["rows"]
    assert rows and all([*row["milliseconds"]] == ["ours"] for row in rows)
    bench(["rms_norm"], "cpu", out, side=["eager", "peer"])
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["failed"] == {"peer": "it is not installed"} and [*rows[1]["milliseconds"]] == ["eager"]
    with pytest.raises(KernelError, match="rms_norm has no implementation 'other'") as caught:
        bench(["rms_norm"], "cpu", out, side=["other"])
    assert caught.value.fix == "choose of: eager, ours, peer"


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from veomni_hook.tools.bench.record import write_plot

    row = Row("op", "step", "float32", "4 x 4", "bytes", 8, {"eager": 1.5}, {"eager": 0.5}, {})
    write_plot([row], "a run", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("home", [linear_cross_entropy_grpo, bench_distillation])
def test_the_sides_of_losses_agree(home: ModuleType) -> None:
    (problem,) = home.problems("cpu", quick=True)
    leaves = [leaf.clone().requires_grad_() for leaf in problem.leaves]
    found = []
    for name, side in problem.sides.items():
        if "without" in name:  # of something else
            continue
        loss = side(*leaves)
        assert isinstance(loss, torch.Tensor)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert len(found) == 3
    for other in found[1:]:
        for one, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(one, expected)
