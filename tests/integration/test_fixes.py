"""Fixes of upstream's mistakes: off by default, and what they promise in every release where they are on."""

import pytest
import transformers

from tests.processes import facts, started

FIX = "veomni_hook.patches.fixes.raw_router_logits"
#: Releases whose routers return probabilities.
AFFECTED = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 9)
SCRIPT = """
import json, warnings
warnings.simplefilter("error")
import veomni_hook.install
warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import veomni_hook
sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, num_experts=6, num_local_experts=6, num_experts_per_tok=2,
             moe_intermediate_size=24, shared_expert_intermediate_size=24, output_router_logits=True)
ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
found = {}
for family in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    (router,) = (each for each in model.modules() if type(each).__name__.endswith("Router"))
    torch.nn.init.normal_(router.weight)
    seen = []
    router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().reshape(-1, 32)))
    out = model(input_ids=ids, labels=ids)
    raw = seen[0] @ router.weight.T
    given = out.router_logits[0]
    found[family] = dict(
        raw=torch.allclose(given.float(), raw.float(), atol=1e-5),
        logits=out.logits.double().sum().item(), aux=out.aux_loss.item(),
        patches=[each for each in str(veomni_hook.explain(model)).splitlines() if "moe_router/" in each],
    )
print(json.dumps(found))
"""


# On the other releases the fix has nothing to fix.
raw_logits = pytest.mark.sample(2) if AFFECTED else pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixes")
    running = [started("-c", SCRIPT, cache=folder, **fixed) for fixed in ({}, {"VEOMNI_PATCHES": FIX})]
    return [facts(process) for process in running]


@raw_logits
def test_routers_return_their_logits(both):
    plain, fixed = both
    for family in plain:
        assert plain[family]["raw"] is not AFFECTED, family
        assert fixed[family]["raw"], family


@raw_logits
def test_nothing_else_changes_but_the_auxiliary_loss(both):
    plain, fixed = both
    for family in plain:
        assert fixed[family]["logits"] == pytest.approx(plain[family]["logits"], rel=1e-6, abs=1e-5), family
        assert (abs(fixed[family]["aux"] - plain[family]["aux"]) > 1e-3) is AFFECTED, family
        # The router's route gives way to the fix, where there is one.
        assert bool(plain[family]["patches"]) and bool(fixed[family]["patches"]) is not AFFECTED, family


UNDER_AUTOCAST = """
import json
import veomni_hook.install
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import veomni_hook
sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
(router,) = (module for module in model.modules() if type(module).__name__.endswith("Router"))
torch.nn.init.normal_(router.weight)
x = torch.randn(5, 32)
with torch.autocast("cpu", torch.bfloat16):
    logits, *_ = router(x)
expected = x @ router.weight.T
if affected:
    expected = expected.softmax(-1)
print(json.dumps({"dtype": str(logits.dtype), "far": (logits - expected).abs().max().item(),
                  "route": "moe_router/" in str(veomni_hook.explain(model))}))
"""


def test_logits_in_float32_under_autocast(tmp_path):
    fixes = ({}, {"VEOMNI_PATCHES": "veomni_hook.patches.fixes.router_in_float32"})
    script = f"affected = {AFFECTED}\n{UNDER_AUTOCAST}"
    plain, fixed = (facts(p) for p in [started("-c", script, cache=tmp_path, **fix) for fix in fixes])
    assert plain["far"] > 2e-4 and plain["route"]
    assert fixed["dtype"] == "torch.float32" and fixed["far"] < 1e-5 and fixed["route"]
