"""LoRA with PEFT of Qwen3-30B-A3B: attention and stacked experts, packed text, checkpointed layers."""

import veomni_hook.install  # before peft and transformers
import sys
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-30B-A3B"
STEPS = 8

torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, device_map=device, output_router_logits=True)
lora = LoraConfig(
    task_type="CAUSAL_LM",
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)
model = get_peft_model(model, lora).train()
model.gradient_checkpointing_enable({"use_reentrant": False})
model.enable_input_require_grads()
model.print_trainable_parameters()

length = min(4096, model.config.max_position_embeddings)
ids = tokenizer(tokenizer.eos_token.join(topics.values()), return_tensors="pt").input_ids[0]
batches = ids[: STEPS * length].view(STEPS, 1, length).to(device)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-4)
losses = []
for batch in batches:
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
print(veomni_hook.explain(model))
model.save_pretrained("adapters")
