"""What a patch is for, told from its code. The functions below are only read as text."""
# ruff: noqa: F821

from __future__ import annotations

import pytest

from scripts.veomni_surroundings import surroundings
from veomni_hook import PatchConfig, create_patch_from_external
from veomni_hook.tools.migration.answers import (
    BY_DESIGN,
    FEATURES,
    MISSING,
    REASONS,
    SAME,
    answer,
    measured,
    releases_measured,
)
from veomni_hook.tools.migration.concerns import Concern, concerns
from veomni_hook.tools.migration.vocabulary import MEANINGS

UPSTREAM = '''
class Norm:
    def forward(self, x):
        """Same."""
        return self.weight * x

class Router:
    def forward(self, x):
        router_logits = F.linear(x, self.weight)
        values, indices = torch.topk(softmax(router_logits), 2)
        return router_logits, values, indices

class Tower:
    def __init__(self, config):
        self.speech = Speech(config)

    def forward(self, x, cu_seqlens):
        max_seqlen = (cu_seqlens[1:] - cu_seqlens[:-1]).max()
        out = self.attend(x, max_seqlen)
        out += x
        return out

    def get_image_features(self, pixels, grid):
        sizes = grid.prod(-1).tolist()
        return torch.split(self.tower(pixels), sizes)

class Model:
    def forward(self, x, position_ids=None, feature_attention_mask=None):
        if position_ids is None:
            position_ids = torch.arange(4).view(1, 1, -1).expand(4, 1, -1)
        return self.layers(x, position_ids)

class Speech:
    pass

if True:
    def rotary(q, k, cos, sin):
        return q, k
'''

BLOCK = """
    from veomni.ops.dispatch import OpSlot, OpsConfigSlot
    norm_slot = OpSlot("rms_norm", "standard")
    loss_slot = OpSlot("cross_entropy_loss", "causal")
    experts_slot = OpSlot("moe_experts", "standard")
    conv_slot = OpSlot("causal_conv1d", "standard")
    sparse_slot = OpsConfigSlot("dsa_attention_implementation")

    def position_of(self, x):
        return self.get_rope_index(x)
"""


def made() -> PatchConfig:
    config = PatchConfig("transformers.models.tiny.modeling_tiny", "patched_modeling_tiny_gpu.py")
    config.add_post_import_block(BLOCK)
    config.add_import("veomni.distributed.sequence_parallel", names=["gather_outputs as gather"])
    config.add_import("veomni.utils.model_outputs", names=["OutputWithLogProbs"])
    config.add_import("veomni.models.transformers.tiny.packed_utils", names=["pack"])
    return config


def of(target: str, replacement: object, config: PatchConfig | None = None) -> dict[str, str]:
    config = config or made()
    kind = config.override_method if "." in target else config.replace_function
    kind(target, replacement)
    return {one.name: one.evidence for one in concerns(config.patches[-1], config, UPSTREAM)}


def slots(self, x) -> OutputWithLogProbs:
    """norm_slot in a docstring, and a class in an annotation, are not used."""
    if loss_slot.use_non_eager_impl:
        return loss_slot(x)
    return experts_slot(self, x)


def test_slots_are_resolved_through_the_config() -> None:
    assert of("Norm.forward", slots) == {
        "loss": "OpSlot cross_entropy_loss/causal",
        "kernel": "OpSlot moe_experts/standard",
        "expert parallel": "OpSlot moe_experts/standard",
    }


def never_asks(self, x, balance=None, **kwargs):
    if kwargs.get("balance", False):
        x = norm_slot(x)
    return loss_slot(x) if kwargs.get("scale", False) else x


def asks_twice(self, x, balance=None, **kwargs):
    if kwargs.get("balance", False):
        x = norm_slot(x)
    return norm_slot(x)


def asks_what_it_puts_there(self, x, balance=None, **kwargs):
    kwargs["balance"] = balance
    if kwargs.get("balance", False):
        x = norm_slot(x)
    return x


def test_a_slot_in_a_branch_that_never_runs() -> None:
    expected = "looks in **kwargs for the parameter balance"
    assert of("Norm.forward", never_asks)["kernel"] == expected
    assert of("Norm.forward", never_asks)["loss"] == "OpSlot cross_entropy_loss/causal"
    for replacement in (asks_twice, asks_what_it_puts_there):
        assert of("Norm.forward", replacement)["kernel"] == "OpSlot rms_norm/standard"
    assert answer(Concern("kernel", expected), ("rms_norm/b",), None).status == BY_DESIGN


def hides(self, norm_slot):
    return norm_slot(self.weight)


def test_a_parameter_with_the_name_of_a_slot_is_no_slot() -> None:
    assert "kernel" not in of("Norm.forward", hides)


def several(self, x):
    return OutputWithLogProbs(gather(pack(sparse_slot(norm_slot(x)))))


def test_imports_and_every_slot() -> None:
    assert of("Norm.forward", several) == {
        "kernel": "OpsConfigSlot dsa_attention_implementation; OpSlot rms_norm/standard",
        "log-probs": "OutputWithLogProbs of veomni.utils.model_outputs",
        "sequence parallel": "gather_outputs of veomni.distributed.sequence_parallel",
        "packing": "pack of veomni.models.transformers.tiny.packed_utils",
    }


def helper(x):
    from ..parallel_plan import get_parallel_plan

    return norm_slot(get_parallel_plan(x))


def calls_helper(self, x):
    return helper(x)


def test_what_a_helper_uses_counts_for_its_caller() -> None:
    config = made()
    config.add_helper(helper)
    found = of("Norm.forward", calls_helper, config)
    assert found == {
        "kernel": "OpSlot rms_norm/standard",
        "expert parallel": "get_parallel_plan of ..parallel_plan",
    }
    assert [(one.kind, one.names, one.concerns[0].name) for one in surroundings(config, UPSTREAM)] == [
        ("helper", ("helper",), "kernel"),
        ("helper", ("position_of",), "no change"),
    ]


def grows(self, x):
    return late(x)


def test_a_config_that_grows_is_read_again() -> None:
    config = made()
    assert of("Norm.forward", grows, config).keys() == {"other"}
    config.add_import("torch_npu", names=["late"])
    assert of("Router.forward", grows, config)["kernel"] == "late of torch_npu"


def keeps(self, config):
    self.norm = norm_slot(config)
    self.conv = conv_slot.bound_kernel()


def asks_kept(self, x, cu_seqlens):
    return self.conv(x, cu_seqlens)


def test_a_kernel_that_init_keeps() -> None:
    config = made()
    of("Tower.__init__", keeps, config)
    assert of("Tower.forward", asks_kept, config)["kernel"] == "OpSlot causal_conv1d/standard"


def given_length(self, x, cu_seqlens, max_seqlen):
    out = self.attend(x, max_seqlen)
    out = out + x
    return out


def whole(self, pixels, grid):
    return self.tower(pixels)


def raises(self, config):
    raise NotImplementedError


def not_built(self, config):
    self.speech = None


def three_rows(self, x, position_ids=None):
    position_ids = torch.arange(4).view(1, 1, -1).expand(3, 1, -1)
    return self.layers(x, position_ids) + 0.0 * self.tower.dummy_forward()


def raw(self, x):
    logits = F.linear(x, self.weight)
    weights, indices = torch.topk(softmax(logits), 2)
    return logits, weights, indices


def precise(self, x):
    with torch.autocast("cuda", enabled=False):
        return self.weight * x


def wide(self, x):
    return (self.weight.float() * x).to(x.dtype)


def anchored(self, x):
    return self.weight * x + x.sum() * 0.0


def rows(self, x):
    return torch.zeros(2, dtype=torch.float32) + self.weight * x


@pytest.mark.parametrize(
    ("target", "replacement", "expected"),
    [
        ("Tower.forward", given_length, {"host sync": "max_seqlen", "autograd": "out is not changed in place"}),
        (
            "Tower.get_image_features",
            whole,
            {
                "host sync": "drops tolist",
                "sequence parallel": "features stay one tensor, not split by image",
            },
        ),
        ("Tower.__init__", raises, {"exclusion": "raises, whatever the arguments"}),
        ("Tower.__init__", not_built, {"exclusion": "does not name Speech"}),
        (
            "Model.forward",
            three_rows,
            {
                "dummy forward": "dummy_forward",
                "packing": "takes no feature_attention_mask",
                "position ids": "position ids with 3 rows",
            },
        ),
        ("Router.forward", raw, {"load-balancing loss": "returns logits before softmax"}),
        ("Norm.forward", precise, {"numerics": "autocast is off"}),
        ("Norm.forward", wide, {"numerics": "in float32: weight"}),
        ("Norm.forward", anchored, {"dummy forward": "a term times 0.0, for gradients"}),
        ("Norm.forward", rows, {"other": "new here: dtype, float32, torch, zeros"}),
    ],
)  # fmt: skip
def test_what_changes_against_upstream(target: str, replacement: object, expected: dict[str, str]) -> None:
    config = made()
    config.exclude_from_output("Speech")
    assert of(target, replacement, config) == expected


def same(self, x):
    return self.weight * x


def same_with_position(self, x, cache_position=None):
    return self.weight * x


def test_upstreams_body_again_is_no_change() -> None:
    assert of("Norm.forward", same) == {"no change": "the names of upstream's body"}
    assert of("Norm.forward", same_with_position) == {"no change": "upstream's body with cache_position"}


def rotary(q, k, cos, sin):
    return helper(q, k)


def test_what_no_rule_knows_is_other_with_what_is_new() -> None:
    assert of("rotary", rotary) == {"other": "new here: helper"}


@pytest.mark.parametrize(
    ("name", "concern"), [("dummy_forward", "dummy forward"), ("get_parallel_plan", "expert parallel")]
)
def test_a_method_that_is_called_by_name_is_for_nothing_else(name: str, concern: str) -> None:
    assert of(f"Tower.{name}", several) == {concern: f"adds {name}"}


def test_a_replacement_in_another_package() -> None:
    config = made()
    config.add_patch(create_patch_from_external("Norm", "liger_kernel.transformers.rms_norm", "LigerRMSNorm"))
    found = concerns(config.patches[-1], config, UPSTREAM)
    assert found == (Concern("kernel", "LigerRMSNorm of liger_kernel.transformers.rms_norm"),)


def test_what_is_left_out_and_dropped() -> None:
    config = made()
    config.exclude_from_output("Speech", "Talker")
    config.drop_import_names("OutputWithLogProbs", "max_seqlen")
    of("Norm.forward", several, config)
    of("Tower.forward", asks_kept, config)
    found = {one.names: one for one in surroundings(config, UPSTREAM)}
    assert found["Speech", "Talker"].concerns == (Concern("exclusion", "excluded from the output"),)
    assert found["OutputWithLogProbs",].concerns[0].name == "log-probs"
    assert found["OutputWithLogProbs",].targets == ("Norm.forward",)
    assert found["max_seqlen",].concerns[0].name == "other" and found["max_seqlen",].targets == (
        "Tower.forward",
    )


# Answers

MEASURED = {
    "ran": ["rms_norm", "hyper_connection"],
    "numbers": "",
    "packing": "loss: 1e-1 of 1",
    "host sync": "",
    "numerics": {"Norm": "", "Router": "torch.bfloat16, not torch.float32"},
}


def test_every_concern_has_an_answer() -> None:
    assert {name for name in MEANINGS if answer(Concern(name, "seen"), (), None).status} == {*MEANINGS}
    assert {*FEATURES, *REASONS} <= {*MEANINGS}


@pytest.mark.parametrize(
    ("evidence", "routes", "status", "by"),
    [
        ("OpSlot rms_norm/standard", ("rotary/a", "rms_norm/b"), SAME, "rms_norm/b"),
        ("OpSlot rms_norm/standard", ("rotary/a",), MISSING, "no kernel for rms_norm/standard"),
        ("OpSlot rms_norm/a; OpSlot mhc/a", ("rms_norm/b",), MISSING, "no kernel for mhc/a"),
        ("OpSlot mhc/pre", ("rms_norm/b", "hyper_connection/mix"), SAME, "hyper_connection/mix"),
        ("npu_rms_norm of torch_npu", ("rms_norm/b",), SAME, "rms_norm/b"),
        ("npu_rms_norm of torch_npu", (), MISSING, "no kernel"),
        ("chunk of fla", ("sample_boundaries/found_once",), MISSING, "no kernel"),
        ("drops use_kernel_forward_from_hub", (), SAME, "kernels of the Hub run only with `use_kernels=True`"),
    ],
)  # fmt: skip
def test_a_kernel_has_the_same_effect_if_a_route_of_its_op_has_run(
    evidence: str, routes: tuple[str, ...], status: str, by: str
) -> None:
    result = answer(Concern("kernel", evidence), routes, None)
    assert (result.status, result.by) == (status, by)
    without_runs = answer(Concern("kernel", evidence), routes, {"ran": []})
    assert without_runs.status == (status if evidence.startswith("drops ") else MISSING)


@pytest.mark.parametrize(
    ("concern", "target", "status", "said"),
    [
        ("host sync", "Tower.forward", SAME, "no wait"),
        ("packing", "Model.forward", MISSING, "loss: 1e-1 of 1"),
        ("autograd", "Tower.forward", SAME, "in place"),
        ("position ids", "Model.forward", MISSING, "not measured for this model"),
        ("numerics", "Norm.forward", SAME, "upstream's own dtypes"),
        ("numerics", "Router.forward", BY_DESIGN, "torch.bfloat16, not torch.float32"),
        ("numerics", "Other.forward", BY_DESIGN, "not measured alone"),
        ("quantisation-aware training", "Norm.forward", BY_DESIGN, "quantiser"),
        ("other", "Norm.forward", MISSING, "not recognised"),
    ],
)
def test_the_rest_is_what_was_measured(concern: str, target: str, status: str, said: str) -> None:
    result = answer(Concern(concern, "seen"), (), MEASURED, target)
    assert result.status == status and said in result.by


def test_the_release_that_was_measured_last_before_is_read() -> None:
    module = "transformers.models.llama.modeling_llama"
    first, *_, last = releases_measured()
    newest = measured(module, last)
    assert newest is not None and measured(module, "99.0") == newest
    assert measured(module, "4.0") == measured(module, first)
    assert measured("transformers.models.none.modeling_none", last) is None
