"""Supervised fine-tuning of a model that sees, with TRL: it learns the names of colours."""

import veomni_hook.install  # before trl and transformers
import sys

import torch
from datasets import Dataset
from PIL import Image, ImageColor
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from veomni_hook.multimodal import collate_metadata

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-VL-2B-Instruct"

processor = AutoProcessor.from_pretrained(MODEL)
model = AutoModelForImageTextToText.from_pretrained(MODEL)


def samples():
    for number, name in enumerate(ImageColor.colormap):
        yield {
            "images": [Image.new("RGB", (64 + 32 * (number % 3), 64), name)],
            "prompt": [{"role": "user", "content": "Colour?"}],
            "completion": [{"role": "assistant", "content": name}],
        }


dataset = Dataset.from_generator(samples)
bf16 = torch.cuda.is_available()  # the default of TRL; a CPU computes in float32
args = SFTConfig("out", bf16=bf16, max_length=None, max_steps=8, logging_steps=1, save_strategy="no")
collator = DataCollatorForVisionLanguageModeling(processor)
trainer = SFTTrainer(
    model,
    args=args,
    train_dataset=dataset,
    processing_class=processor,
    data_collator=collate_metadata(model.config, collator),
)
trainer.train()
print(veomni_hook.explain(trainer.model))
