"""Trainer with images: a model that sees learns the names of colours."""

import veomni_hook.install  # before transformers
import sys

from PIL import Image, ImageColor
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from veomni_hook.multimodal import collate_metadata

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-VL-2B-Instruct"

processor = AutoProcessor.from_pretrained(MODEL)
model = AutoModelForImageTextToText.from_pretrained(MODEL)


def conversation(number, name):
    image = Image.new("RGB", (64 + 32 * (number % 3), 64), name)
    question = {
        "role": "user",
        "content": [{"type": "image", "image": image}, {"type": "text", "text": "Colour?"}],
    }
    return [question, {"role": "assistant", "content": [{"type": "text", "text": name}]}]


def collate(conversations):
    batch = processor.apply_chat_template(
        conversations,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"padding": True, "return_tensors": "pt"},
    )
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


dataset = [conversation(*pair) for pair in enumerate(ImageColor.colormap)]
args = TrainingArguments(
    "out", max_steps=8, logging_steps=1, save_strategy="no", report_to="none", remove_unused_columns=False
)
trainer = Trainer(
    model,
    args,
    data_collator=collate_metadata(model.config, collate),
    train_dataset=dataset,
    eval_dataset=dataset[:8],
)
trainer.train()
trainer.evaluate()
print(veomni_hook.explain(model))
