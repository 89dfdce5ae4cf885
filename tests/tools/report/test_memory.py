"""What `explain` says of the setting ``memory``."""

from tests.processes import outputs, started

SCRIPT = """
import torch, veomni_hook.install, veomni_hook
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

fields = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
for config, kind in ((LlamaConfig, LlamaForCausalLM), (MixtralConfig, MixtralForCausalLM)):
    with torch.device("meta"):
        model = kind(config(**fields))
    print("\\n".join(veomni_hook.explain(model).notes))
model.gradient_checkpointing_disable()
print("\\n".join(veomni_hook.explain(model).notes))
"""
KEPT = "their inputs, and what attention computed, are kept on the host"
NO_TILES = "memory: no module of it is known to work on each position by itself, so only the loss, and experts, take fewer rows"


def test_what_is_checkpointed_and_what_runs_in_tiles():
    told = outputs(started("-c", SCRIPT, VEOMNI_MEMORY="offload,tiles"))[0].splitlines()
    assert told == [
        f"memory: checkpointed: 2 LlamaDecoderLayer; {KEPT}",
        "memory: in tiles of positions where rows are many: LlamaMLP (2 modules)",
        f"memory: checkpointed: 2 MixtralDecoderLayer; {KEPT}",
        NO_TILES,
        "memory: no layer is checkpointed: the script disabled it",
        NO_TILES,
    ]
