"""DeepSpeed ZeRO-3 through Trainer: `deepspeed deepspeed_zero3.py` or `torchrun deepspeed_zero3.py`."""

import veomni_hook.install  # before transformers
import sys
from pydoc_data.topics import topics

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"
ZERO3 = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}

args = TrainingArguments(
    "out", deepspeed=ZERO3, max_steps=8, logging_steps=1, save_strategy="no", report_to="none"
)  # before the model, so that its weights are sharded as they are loaded
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
dataset = [tokenizer(text, truncation=True, max_length=128) for text in topics.values()]
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, args, data_collator=collator, train_dataset=dataset)
trainer.train()
print(veomni_hook.explain(model))
