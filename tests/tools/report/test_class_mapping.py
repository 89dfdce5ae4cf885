"""transformers' own registry of classes beside the hook: who registers first makes no difference."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.kernels.patched_qwen3 import UPSTREAM, batch, load, tiny_config
from veomni_hook.kernels.selection.process_choice import STATE, set_choice
from veomni_hook.tools.cli.list.rows import registered_rows
from veomni_hook.tools.report.class_mapping import registered_for
from veomni_hook.tools.report.explanation import explain

registry = pytest.importorskip("transformers.monkey_patching")

SCRIPT = """
import json, sys
import torch
from torch import nn

class Scaled(nn.Module):  # not a norm, with the attributes of one
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.5))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return hidden_states * self.weight

class Half(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.gate_proj(hidden_states) / 2

class Never(nn.Module):
    pass

def activate():
    import veomni_hook.install

def register():
    from transformers.monkey_patching import register_patch_mapping
    # The exact name has precedence over the expression that fits as well.
    register_patch_mapping({"^Qwen3(RMSNorm|MLP)$": Scaled, "Qwen3MLP": Half, "Llama": Never})

steps = {"register": register, "activate": activate}
for step in sys.argv[1:]:
    steps[step]()

from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.monkey_patching import clear_patch_mapping

sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, head_dim=8)

def run():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.arange(10)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    kinds = [type(model.model.norm).__name__, type(model.model.layers[0].mlp).__name__]
    numbers = [loss.item(), *(each.grad.double().sum().item() for each in model.parameters())]
    said = ""
    if "activate" in sys.argv:
        import veomni_hook
        said = str(veomni_hook.explain(model))
    return kinds, numbers, said

mapped = run()
clear_patch_mapping()
print(json.dumps([mapped, run()]))
"""


def outcome(kernels, *steps):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    environment |= {"VEOMNI_KERNELS": kernels, "VEOMNI_BANNER": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *steps], env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kernels", "steps"),
    [
        ("reference", ("register", "activate")),
        ("reference", ("activate", "register")),
        ("auto", ("register", "activate")),
        ("auto", ("activate", "register")),
    ],
)
@pytest.mark.slow
def test_a_registered_class_runs_and_kernels_keep_off_it(kernels, steps):
    """Loss and gradients are those without the hook, with the classes and after they were taken out again."""
    (kinds, numbers, said), (kinds_then, numbers_then, said_then) = outcome(kernels, *steps)
    (expected_kinds, expected, _), (_, expected_then, _) = outcome(kernels, "register")
    assert kinds == expected_kinds == ["Scaled", "Half"] and kinds_then == ["Qwen3RMSNorm", "Qwen3MLP"]
    for found, truth in ((numbers, expected), (numbers_then, expected_then)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(truth), rtol=1e-4, atol=1e-4)
    assert numbers != numbers_then
    assert "mapping '^Qwen3(RMSNorm|MLP)$': 5 modules of the class __main__.Scaled" in said
    assert "mapping 'Qwen3MLP': 1 module of the class __main__.Half" in said
    assert "Never" not in said and "class mapping" not in said_then
    assert "gated_mlp" in said_then and "gated_mlp" not in said


class Scaled(nn.Module):
    """Not a norm, with the attributes of one."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.5))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return hidden_states * self.weight


@pytest.mark.parametrize("choice", ["reference", "auto"])
def test_fused_kernels_keep_off_a_registered_class(choice, tmp_path_factory):
    """Of norms, which kernels of several ops would compute together with what is around them."""
    homes = importlib.import_module(UPSTREAM), load(tmp_path_factory.mktemp("mapped"))
    with STATE.restored():
        set_choice(choice)
        registry.register_patch_mapping({"^Qwen3RMSNorm$": Scaled, "Qwen3": Scaled})
        try:
            registry.unregister_patch_mapping(["Qwen3"])
            with registry.apply_patches():
                upstream, model = (home.Qwen3ForCausalLM(tiny_config()).train() for home in homes)
            said = str(explain(model))
        except ModuleNotFoundError as error:  # 5.17 imports every image processor
            pytest.skip(f"this release's own apply_patches fails: {error}")
        finally:
            registry.clear_patch_mapping()
        model.load_state_dict(upstream.state_dict())
        inputs = batch()
        losses = [each(**inputs).loss for each in (upstream, model)]
        for loss in losses:
            loss.backward()
    assert type(model.model.norm) is Scaled and "9 modules of the class" in said
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), upstream.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert "class mapping" not in str(explain(model))


def test_what_is_registered_is_listed_with_transformers_own_precedence():
    registry.register_patch_mapping({"Norm$": Scaled, "^Qwen3": nn.Identity, "Qwen3MLP": Scaled})
    try:
        names = ("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Model", "Llama")
        found = list(registered_for(names))
        rows = registered_rows()
    finally:
        registry.clear_patch_mapping()
    scaled, identity = f"{__name__}.Scaled", "torch.nn.modules.linear.Identity"
    assert found == [
        ("Qwen3RMSNorm", "Norm$", scaled),
        ("Qwen3MLP", "Qwen3MLP", scaled),
        ("Qwen3Model", "^Qwen3", identity),
    ]
    assert [row["config"] for row in rows] == [
        f"Norm$ -> {scaled}",
        f"^Qwen3 -> {identity}",
        f"Qwen3MLP -> {scaled}",
    ]
    assert {row["from"] for row in rows} == {"transformers' class mapping"}
    assert registered_rows() == [] and list(registered_for(names)) == []
