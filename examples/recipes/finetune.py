"""Fine-tune a small language model on Python's documentation: all weights, LoRA, or packed samples."""

import veomni_hook.install  # before peft and transformers
import argparse
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--way", choices=["full", "lora", "packed"], default="full")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--length", type=int, default=256, help="tokens of a step")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(args.model)
# In float32: bfloat16 would round most of AdamW's small steps away.
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)

question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
).to(device)
tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
answer = tokenizer.decode(tokens, skip_special_tokens=True)
print(question[0]["content"], answer)

if args.way == "lora":
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
paragraphs = "\n\n".join(topics.values()).split("\n\n")
samples = tokenizer([text for text in paragraphs if text.strip()])["input_ids"]
ids = torch.tensor([[token for sample in samples for token in sample]], device=device)
positions = torch.tensor([[place for sample in samples for place in range(len(sample))]], device=device)
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
model.train()
losses = []
for step in range(args.steps):
    row = slice(step * args.length, (step + 1) * args.length)
    batch = {"input_ids": ids[:, row], "labels": ids[:, row]}
    if args.way == "packed":
        # Positions that begin anew separate the samples; no sample predicts the first token of the next.
        batch["position_ids"] = positions[:, row]
        batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(f"step {step + 1}: loss {losses[-1]:.4f}")
print(veomni_hook.explain(model))
