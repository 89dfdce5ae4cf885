"""QLoRA: LoRA with PEFT on a model that bitsandbytes holds in 4 bits."""

import veomni_hook.install  # before peft and transformers
import sys
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"

torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
dtype = torch.float32 if device == "cpu" else torch.bfloat16
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(
    MODEL, dtype=dtype, quantization_config=four_bits, device_map=device
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")).train()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
losses = []
for text in list(topics.values())[:8]:
    batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(device)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
print(veomni_hook.explain(model))
