"""Small inputs, the same whatever is installed, for everything that commands print as tables."""

from __future__ import annotations

from collections.abc import Callable

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


def list_() -> None:
    """`list`: a family with many ops, one with an op without a kernel, one with none, and two configs."""
    ops = ("rms_norm", "rotary", "gated_mlp", "moe_experts", "moe_router", "linear_cross_entropy")
    config = {"from": "settings", "device": "any", "patches": 1, "installed": True}
    list_command.show_families(
        [
            {"family": "tiny_moe", "ops": dict.fromkeys(ops, 1), "no_kernel": {}},
            {"family": "vision", "ops": {"rms_norm": 4}, "no_kernel": {"rotary": 1}},
            {"family": "auto", "ops": {}, "no_kernel": {}},
        ],
        [
            {"family": "tiny_moe", "config": "my_patches:config", **config},
            {
                "family": "transformers.models.*",
                "config": "a_company.training.patches:everywhere",
                **config,
                "from": "entry point of a-company-training",
                "device": "gpu",
            },
        ],
    )


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
    row = {"op": "rms_norm", "variant": "cast_before_weight"}
    explain.show_ops(
        [
            {
                **row,
                "backend": "triton",
                "chosen": True,
                "reason": "can run here",
                "description": "fused forward and backward; a row has the same bits in any batch",
            },
            {
                **row,
                "backend": "eager",
                "chosen": False,
                "reason": "triton comes first",
                "description": "the upstream code",
            },
            {
                "op": "linear_cross_entropy",
                "variant": "causal_lm",
                "backend": "npu",
                "chosen": False,
                "reason": "needs torch_npu>=2.7.1, which is not installed",
                "description": "torch_npu's operators, in chunks of the vocabulary",
            },
        ],
        {"triton": ["rms_norm", "rotary", "gated_mlp", "moe_experts", "linear_cross_entropy"], "npu": []},
        "cuda (NVIDIA H200, SM90), torch 2.13.0, triton 3.5.1; kernels = auto",
    )


def explain_() -> None:
    """`explain`: a module with patches, one that yields, one place that is missed, and slots."""
    explain.show(
        {
            "module": MODULE,
            "distribution": "transformers",
            "version": "5.99.0",
            "source": f"/opt/python/lib/python3.13/site-packages/{MODULE.replace('.', '/')}.py",
            "patch_hash": "0123456789abcdef",
            "applied": [
                {
                    "lines": (31, 40),
                    "kind": "route",
                    "target": "TinyMoeRMSNorm.forward",
                    "reason": "asks for a kernel of rms_norm, and falls back to the statements below it",
                    "config": "veomni_hook.idioms",
                },
                {
                    "lines": (98, 99),
                    "kind": "method_override",
                    "target": "TinyMoeMLP.forward",
                    "reason": "count the calls",
                    "config": "my_patches:config",
                },
            ],
            "class_mapping": [
                {"class": "OddNorm", "registered": "Norm$", "replacement": "my_package.layers.AnotherNorm"}
            ],
            "yielded": [
                {
                    "kind": "route",
                    "target": "TinyMoeMLP.forward",
                    "reason": "my_patches:config patches it",
                    "config": "veomni_hook.idioms",
                }
            ],
            "missed": [
                {
                    "status": "missed",
                    "op": "rms_norm",
                    "target": "Odd.forward",
                    "code": "other_form",
                    "reason": MISSED,
                }
            ],
            "slots": [
                {
                    "name": "veomni_rms_norm_cast_before_weight",
                    "op": "rms_norm",
                    "variant": "cast_before_weight",
                    "status": "routed",
                    "kernel": "torch",
                    "decisions": ["triton: needs a device of type cuda, found cpu", "torch: can run here"],
                },
                {
                    "name": "veomni_moe_experts_batched_gated",
                    "op": "moe_experts",
                    "variant": "batched_gated",
                    "status": "no_kernel",
                    "kernel": "eager",
                    "decisions": [f"eager: {NO_KERNEL}"],
                },
            ],
            "untouched": [f"TinyMoe{name}" for name in ("Attention", "DecoderLayer", "Model", "ForCausalLM")],
        },
        "/home/somebody/.cache/veomni-hook/transformers-5.99.0/0123456789abcdef/modeling_tiny_moe.py",
    )


def check_() -> None:
    """`check`: a patch that applies, one that yields and one that fails."""
    lines = "rms_norm/cast_before_weight, lines 31-40"
    check.show(
        [
            Verdict(MODULE, "any", "idioms", "route", "TinyMoeRMSNorm.forward", "applies", lines),
            Verdict(
                MODULE, "any", "mine:config", "method_override", "TinyMoeMLP.forward", "applies", "lines 3-4"
            ),
            Verdict(
                MODULE, "gpu", "idioms", "route", "TinyMoeMLP.forward", "yields", "mine:config patches it"
            ),
            Verdict(
                *(MODULE, "any", "mine:config", "method_override", "TinyMoeNrom.forward", "FAILS"),
                "TinyMoeNrom is not defined in this module (mine.py:14)",
                "correct the target; nearest names: TinyMoeRMSNorm, TinyMoeMLP, TinyMoeExperts",
            ),
        ]
    )


def doctor_() -> None:
    """`doctor`: fields, tables, an empty section, a problem and a hazard."""
    doctor.show(
        {
            "versions": {
                "veomni-hook": "0.1.0",
                "python": "3.13.1 (/opt/python/environments/training/bin/python)",
                "transformers": "5.99.0",
                "triton": None,
            },
            "settings": [
                {"setting": "kernels", "value": "auto", "from": "default", "beat": []},
                {
                    "setting": "cache_dir",
                    "value": "/scratch/somebody/veomni-hook",
                    "from": "VEOMNI_CACHE_DIR",
                    "beat": ["'/tmp/cache' (/home/somebody/project/pyproject.toml)"],
                },
            ],
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
    )


def bench_() -> None:
    """`bench`: two parts with four sides, the time on the host, and a side that failed."""
    sides = ("eager", "torch.compile", "liger", "triton")
    times = dict(zip(sides, (1.2345, 0.9876, 0.5432, 123.4561), strict=True))
    share = dict(zip(sides, (0.081, 0.123, 0.983, 1.0), strict=True))
    shape = "131,072 x 4,096"
    bench.show(
        [
            Measured("rms_norm", "forward", "bfloat16", shape, "bytes", 1, times, share, {}),
            Measured(
                *("rms_norm", "step", "bfloat16", shape, "bytes", 1, times, share),
                {"eager": 10_240 * 2**20, "triton": 1024 * 2**20},
                against={
                    "liger": compare([[1.0] * 6], [[0.5] * 6]),
                    "triton": compare([[1.0] * 6], [[9.0] * 6]),
                },
            ),
            Measured("rms_norm", "host", "bfloat16", shape, "", 0, {"eager": 0.05}, {}, {}),
            Measured(
                "rms_norm", "failed", "bfloat16", shape, "", 0, {}, {}, {}, {"liger": "it is not there"}
            ),
        ],
        {"device": "NVIDIA H200", "torch": "2.13.0"},
    )


COMMANDS: dict[str, Callable[[], None]] = {
    "list": list_,
    "list-by-site": sites_,
    "kernels": kernels_,
    "explain": explain_,
    "check": check_,
    "doctor": doctor_,
    "bench": bench_,
}
