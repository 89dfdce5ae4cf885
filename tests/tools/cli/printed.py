"""Small inputs, the same whatever is installed, for everything that commands print as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from veomni_hook.tools.bench.run import Row as Measured
from veomni_hook.tools.cli import bench, doctor, explain
from veomni_hook.tools.cli.check import command as check
from veomni_hook.tools.cli.check.verdict import Verdict
from veomni_hook.tools.cli.list import command as list_command
from veomni_hook.tools.cli.list import sites
from veomni_hook.tools.coverage import Row, Total
from veomni_hook.tools.significance import compare

MODULE = "transformers.models.tiny_moe.modeling_tiny_moe"
NO_KERNEL = "no kernel exists for this formula on any machine; upstream's code runs"
MISSED = "nearest idiom weight/cast_before_weight: expected Mult, found Div (line 214)"


def rows(*header: str, cells: Iterable[tuple[object, ...]]) -> list[dict[str, object]]:
    """Rows with the names of their columns."""
    return [dict(zip(header, row, strict=True)) for row in cells]


def list_() -> None:
    """`list`: a family with many ops, one with an op without a kernel, one with none, and two configs."""
    ops = ("rms_norm", "rotary", "gated_mlp", "moe_experts", "moe_router", "linear_cross_entropy")
    everywhere = (
        "transformers.models.*",
        "a_company.training.patches:everywhere",
        "entry point of a-company-training",
    )
    list_command.show_families(
        rows("family", "ops", "no_kernel", cells=[
            ("tiny_moe", dict.fromkeys(ops, 1), {}),
            ("vision", {"rms_norm": 4}, {"rotary": 1}),
            ("auto", {}, {}),
        ]),
        rows("family", "config", "from", "device", "patches", "installed", cells=[
            ("tiny_moe", "my_patches:config", "settings", "any", 1, True),
            (*everywhere, "gpu", 1, True),
        ]),
    )  # fmt: skip


def sites_() -> None:
    """`list --by site`: candidates of every status, and the totals."""
    sites.show(
        [
            Row(MODULE, "TinyMoeRMSNorm.forward", "rms_norm", "cast_before_weight", "routed", ""),
            Row(MODULE, "TinyMoeExperts.forward", "moe_experts", "batched_gated", "no_kernel", NO_KERNEL),
            Row(MODULE, "Odd.forward", "rms_norm", "", "missed", MISSED),
        ],
        [
            Total("rms_norm", 218, 215, 1, 2, 12, 3),
            Total("moe_experts", 74, 71, 0, 2, no_kernel=1),
            Total("linear_cross_entropy/conditional", 0, 0, 0, 0),
        ],
    )


def kernels_() -> None:
    """`explain`: the kernels of two ops, and the presets."""
    header = ("op", "variant", "backend", "chosen", "reason", "description")
    norm, fused = (
        ("rms_norm", "cast_before_weight"),
        "fused forward and backward; a row has the same bits in any batch",
    )
    missing = ("npu", False, "needs torch_npu>=2.7.1, which is not installed")
    explain.show_ops(
        rows(*header, cells=[
            (*norm, "triton", True, "can run here", fused),
            (*norm, "eager", False, "triton comes first", "the upstream code"),
            ("linear_cross_entropy", "causal_lm", *missing, "torch_npu's operators, in chunks of the vocabulary"),
        ]),
        {"triton": ["rms_norm", "rotary", "gated_mlp", "moe_experts", "linear_cross_entropy"], "npu": []},
        "cuda (NVIDIA H200, SM90), torch 2.13.0, triton 3.5.1; kernels = auto",
    )  # fmt: skip


def explain_() -> None:
    """`explain`: a module with patches, one that yields, one place that is missed, and slots."""
    applied = ("lines", "kind", "target", "reason", "config")
    routed = "asks for a kernel of rms_norm, and falls back to the statements below it"
    slots = ("name", "op", "variant", "status", "kernel", "decisions")
    decisions = ["triton: needs a device of type cuda, found cpu", "torch: can run here"]
    experts = ("moe_experts", "batched_gated")
    explain.show(
        {
            "module": MODULE,
            "distribution": "transformers",
            "version": "5.99.0",
            "source": f"/opt/python/lib/python3.13/site-packages/{MODULE.replace('.', '/')}.py",
            "patch_hash": "0123456789abcdef",
            "applied": rows(*applied, cells=[
                ((31, 40), "route", "TinyMoeRMSNorm.forward", routed, "veomni_hook.idioms"),
                ((98, 99), "method_override", "TinyMoeMLP.forward", "count the calls", "my_patches:config"),
            ]),
            "class_mapping": rows("class", "registered", "replacement", cells=[
                ("OddNorm", "Norm$", "my_package.layers.AnotherNorm"),
            ]),
            "yielded": rows(*applied[1:], cells=[
                ("route", "TinyMoeMLP.forward", "my_patches:config patches it", "veomni_hook.idioms"),
            ]),
            "missed": rows("status", "op", "target", "code", "reason", cells=[
                ("missed", "rms_norm", "Odd.forward", "other_form", MISSED),
            ]),
            "slots": rows(*slots, cells=[
                ("veomni_rms_norm_cast_before_weight", "rms_norm", "cast_before_weight", "routed", "torch", decisions),
                ("veomni_moe_experts_batched_gated", *experts, "no_kernel", "eager", [f"eager: {NO_KERNEL}"]),
            ]),
            "untouched": [f"TinyMoe{name}" for name in ("Attention", "DecoderLayer", "Model", "ForCausalLM")],
        },
        "/home/somebody/.cache/veomni-hook/transformers-5.99.0/0123456789abcdef/modeling_tiny_moe.py",
    )  # fmt: skip


def check_() -> None:
    """`check`: a patch that applies, one that yields and one that fails."""
    override = ("mine:config", "method_override")
    check.show(
        [
            Verdict(MODULE, *verdict)
            for verdict in (
                ("any", "idioms", "route", "TinyMoeRMSNorm.forward", "applies", "rms_norm/cast_before_weight, lines 31-40"),
                ("any", *override, "TinyMoeMLP.forward", "applies", "lines 3-4"),
                ("gpu", "idioms", "route", "TinyMoeMLP.forward", "yields", "mine:config patches it"),
                ("any", *override, "TinyMoeNrom.forward", "FAILS", "TinyMoeNrom is not defined in this module (mine.py:14)",
                 "correct the target; nearest names: TinyMoeRMSNorm, TinyMoeMLP, TinyMoeExperts"),
            )
        ]
    )  # fmt: skip


def doctor_() -> None:
    """`doctor`: fields, tables, an empty section, a problem and a hazard."""
    beaten = ["'/tmp/cache' (/home/somebody/project/pyproject.toml)"]
    doctor.show(
        {
            "versions": {
                "veomni-hook": "0.1.0",
                "python": "3.13.1 (/opt/python/environments/training/bin/python)",
                "transformers": "5.99.0",
                "triton": None,
            },
            "settings": rows("setting", "value", "from", "beat", cells=[
                ("kernels", "auto", "default", []),
                ("cache_dir", "/scratch/somebody/veomni-hook", "VEOMNI_CACHE_DIR", beaten),
            ]),
            "hardware": {
                "system": "cuda, SM90",
                "rms_norm": ["triton for 8 of 9 formulas", "eager for 1 of 9 formulas"],
            },
            "plugins": [],
        },
        doctor.Findings(
            ["transformers 4.9 is not transformers>=5.2,<6; fix: pip install 'transformers>=5.2,<6'"],
            ["VEOMNI_KERNEL is set, but no setting has that name"],
        ),
    )  # fmt: skip


def bench_() -> None:
    """`bench`: two parts with four sides, the time on the host, and a side that failed."""
    sides = ("eager", "torch.compile", "liger", "triton")
    times = dict(zip(sides, (1.2345, 0.9876, 0.5432, 123.4561), strict=True))
    share = dict(zip(sides, (0.081, 0.123, 0.983, 1.0), strict=True))
    peak = {"eager": 10_240 * 2**20, "triton": 1024 * 2**20}
    against = {side: compare([[1.0] * 6], [[time] * 6]) for side, time in (("liger", 0.5), ("triton", 9.0))}
    of = ("bfloat16", "131,072 x 4,096")
    bench.show(
        [
            Measured("rms_norm", "forward", *of, "bytes", 1, times, share, {}),
            Measured("rms_norm", "step", *of, "bytes", 1, times, share, peak, against=against),
            Measured("rms_norm", "host", *of, "", 0, {"eager": 0.05}, {}, {}),
            Measured("rms_norm", "failed", *of, "", 0, {}, {}, {}, {"liger": "it is not there"}),
        ],
        {"device": "NVIDIA H200", "torch": "2.13.0"},
    )


COMMANDS: dict[str, Callable[[], None]] = {
    "list": list_, "list-by-site": sites_, "kernels": kernels_, "explain": explain_, "check": check_,
    "doctor": doctor_, "bench": bench_,
}  # fmt: skip
