"""`map_class` in whole models: checkpoints in both directions, and transformers' own class mapping beside it."""

import json
import os
import sys

import pytest

from tests.finders.conftest import HERE, config_of
from tests.processes import LIMIT, started

CLASSES = """
import torch
from torch import nn
from transformers.core_model_loading import Concatenate, WeightConverter
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

class Joined(Qwen3MLP):  # one matrix for gate and up
    def __init__(self, config):
        nn.Module.__init__(self)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)

def conversions():
    sources = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    return [WeightConverter(sources, "mlp.gate_up.weight", operations=[Concatenate(dim=0)])]

class Layer(nn.Module):  # no subclass of the layer that it replaces
    def __init__(self, config, layer_idx):
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_type = "full_attention"  # which the model reads in 5.2

    def forward(self, hidden_states, **options):
        return self.linear(hidden_states)
"""
REGISTERED = """
import torch
from torch import nn

class Half(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states):
        return hidden_states * self.scale / 2
"""
CONFIG = """
from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.qwen3.modeling_qwen3")
config.map_class("Qwen3MLP", "mapped_classes:Joined", weights="mapped_classes:conversions")
layers = PatchConfig("transformers.models.qwen3.modeling_qwen3")
layers.map_class("Qwen3DecoderLayer", "mapped_classes:Layer")
"""
HEAD = """
import json, sys, tempfile
import torch

def activate(name="mapped_config"):
    import veomni_hook
    return veomni_hook.activate(patches=[name], kernels="reference")

def register():
    from transformers.monkey_patching import register_patch_mapping
    from registered_class import Half
    register_patch_mapping({"^Qwen3ML": Half})

def built(cls=None):
    from transformers import AutoModelForCausalLM, Qwen3Config
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes))

def loaded(folder, **options):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, **options)

tokens = torch.arange(10)[None]
def kind(model):
    return type(model.model.layers[0].mlp).__name__
"""
CHECKPOINTS = """
handle = activate()
from veomni_hook import use_mapped_classes
with use_mapped_classes(on=False):
    plain = built()
folders = [tempfile.mkdtemp() for _ in range(3)]
plain.save_pretrained(folders[0])
model, told = loaded(folders[0], output_loading_info=True)
kinds = [kind(plain), kind(model)]
losses = [each(tokens, labels=tokens).loss for each in (plain, model)]
for loss in losses:
    loss.backward()
torch.testing.assert_close(losses[1], losses[0])
mlps = plain.model.layers[0].mlp, model.model.layers[0].mlp
torch.testing.assert_close(
    mlps[1].gate_up.weight.grad, torch.cat([mlps[0].gate_proj.weight.grad, mlps[0].up_proj.weight.grad])
)
model.save_pretrained(folders[1])
made = built()  # was never loaded
made.save_pretrained(folders[2])
import veomni_hook
said = str(veomni_hook.explain(model)), str(veomni_hook.explain(plain))
handle.deactivate()
import safetensors.torch
stored = [safetensors.torch.load_file(folder + "/model.safetensors") for folder in folders]
same = all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
keys = [sorted(each) for each in stored]
again = built()
missing = [sorted(told["missing_keys"]), sorted(told["unexpected_keys"])]
print(json.dumps([kinds, same, keys[0] == keys[1] == keys[2], missing, said, kind(again), kind(made)]))
"""
BOTH = """
for step in sys.argv[1:]:
    {"activate": activate, "register": register}[step]()
from transformers.monkey_patching import clear_patch_mapping
import veomni_hook
first = built()
first(tokens, labels=tokens).loss.backward()
said = str(veomni_hook.explain(first))
clear_patch_mapping()
second = built()
print(json.dumps([kind(first), kind(second), said, str(veomni_hook.explain(second))]))
"""
RECORDS = """
activate("mapped_config:layers")
model = built()
states = model(tokens, output_hidden_states=True).hidden_states
print(json.dumps([len(states), sorted(model._no_split_modules), bool((states[1] == states[0]).all())]))
"""


@pytest.fixture
def outcome(tmp_path):
    (tmp_path / "mapped_classes.py").write_text(CLASSES)
    (tmp_path / "registered_class.py").write_text(REGISTERED)
    (tmp_path / "mapped_config.py").write_text(CONFIG)

    def run(script, *arguments):
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        process = started("-c", HEAD + script, *arguments, PYTHONPATH=path, VEOMNI_BANNER="0")
        out, errors = process.communicate(timeout=LIMIT)
        if "in apply_patches" in errors and "No module named 'torchvision'" in errors:
            pytest.skip("this release's own apply_patches imports every image processor")
        assert process.returncode == 0, errors
        return json.loads(out.splitlines()[-1])

    return run


@pytest.mark.slow
def test_checkpoints_of_upstream_load_into_the_replacement_and_are_saved_as_they_were(outcome):
    kinds, same, same_keys, missing, said, after, made = outcome(CHECKPOINTS)
    assert kinds == ["Qwen3MLP", "Joined"] and made == "Joined" and after == "Qwen3MLP"
    assert same and same_keys and missing == [[], []]
    assert "'Qwen3MLP' of mapped_config:config: 2 modules of the class mapped_classes.Joined" in said[0]
    assert "class mapping" not in said[1]


@pytest.mark.slow
@pytest.mark.parametrize("order", [("activate", "register"), ("register", "activate")])
def test_what_is_registered_with_transformers_wins_and_explain_says_so(outcome, order):
    pytest.importorskip("transformers.monkey_patching")
    first, second, said, said_then = outcome(BOTH, *order)
    assert (first, second) == ("Half", "Joined")
    assert "transformers' class mapping '^Qwen3ML': 2 modules of the class registered_class.Half" in said
    assert "of mapped_config:config gave way: Qwen3MLP was already replaced by registered_class.Half" in said
    assert "gave way" not in said_then and "2 modules of the class mapped_classes.Joined" in said_then


@pytest.mark.slow
def test_hidden_states_of_a_layer_that_subclasses_nothing_are_recorded(outcome):
    assert outcome(RECORDS) == [3, ["Layer", "Qwen3DecoderLayer"], False]


TINY = "transformers.models.tiny.modeling_tiny"
LAYERS = f"""
import torch
from {TINY} import TinyNorm
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
"""
SHOW = (
    f"import veomni_hook.install, json\nimport {{first}}\nimport {TINY} as tiny\n"
    "print(json.dumps([type(tiny.TinyModel().norm).__name__, tiny.__file__.count('5.99.0')]))"
)
EXTERNAL = (
    "from veomni_hook import create_patch_from_external as external\n"
    'config.add_patch(external("TinyNorm", "layers", "Mine"))'
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "verb", ['config.map_class("TinyNorm", "layers:Mine")', EXTERNAL], ids=["mapped", "external"]
)
def test_a_module_of_layers_may_be_imported_first(python, tmp_path, verb):
    """It imports the modeling module, which its own class replaces: neither the order nor the cache matters."""
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "mapping_config.py").write_text(config_of(verb))
    for first in ("layers", TINY):
        for _ in ("a cold cache", "a warm one"):
            code, cache = HERE + SHOW.format(first=first), str(tmp_path / first)
            ran = python(code, VEOMNI_PATCHES="mapping_config", VEOMNI_CACHE_DIR=cache)
            if verb == EXTERNAL:  # its statement is in the patched module: always a circle
                assert "circular import" in ran.err
            else:
                assert ran.result == ["Mine", 1], ran.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", ["layers", "class_config", TINY])
@pytest.mark.parametrize("way", ["from layers import Mine", "import layers; Mine = layers.Mine"])
def test_a_config_that_needs_a_module_that_imports_what_it_patches(python, tmp_path, first, way):
    """While it is imported, it sees upstream's code, as all that configs import; then the module is patched."""
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "class_config.py").write_text(f"{way}\n" + config_of('config.map_class("TinyNorm", Mine)'))
    for _ in range(2):
        ran = python(HERE + SHOW.format(first=first), VEOMNI_PATCHES="class_config")
        assert ran.result == ["Mine", 1], ran.err
        assert (f"layers imports {TINY}" in ran.err) == (first == "layers")
