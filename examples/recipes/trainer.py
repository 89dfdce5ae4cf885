"""Trainer of transformers."""

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

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
dataset = [tokenizer(text, truncation=True, max_length=128) for text in topics.values()]
args = TrainingArguments("out", max_steps=8, logging_steps=1, save_strategy="no", report_to="none")
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, args, data_collator=collator, train_dataset=dataset, eval_dataset=dataset[:8])
trainer.train()
trainer.evaluate()
print(veomni_hook.explain(model))
