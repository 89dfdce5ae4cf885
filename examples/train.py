"""Train a small Qwen3 with transformers' own Trainer, offline, on text that every machine has.

The text is the language reference that Python carries for `help()`; the tokens are its bytes
(`ByT5Tokenizer` needs no files). The model keeps the proportions of Qwen3-0.6B at a quarter of its width.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

from transformers import (
    ByT5Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write losses and step times to this JSON file")
    parser.add_argument(
        "--by-turns",
        action="store_true",
        help="before each step print 'ready' and wait for a line of standard input: two runs can take turns",
    )
    return parser.parse_args()


def make_model(tokenizer: ByT5Tokenizer, layers: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_dataset(tokenizer: ByT5Tokenizer, count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    chooser = random.Random(seed)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    dataset = []
    for _ in range(count):
        start = chooser.randrange(len(text) - length)
        # A character is one byte or more, so `length` characters always fill the window.
        ids = tokenizer(text[start : start + length], add_special_tokens=False)["input_ids"][:length]
        dataset.append({"input_ids": ids, "labels": list(ids)})
    return dataset


class StepRecorder(TrainerCallback):
    """Notes the loss and the wall time of every step; with `by_turns` it waits for its turn before each."""

    def __init__(self, *, by_turns: bool) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._by_turns = by_turns
        self._started = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if self._by_turns:
            print("ready", flush=True)
            if not sys.stdin.readline():
                raise SystemExit("standard input has ended: nobody gives this run its turn")
        self._started = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            # Logging reads the loss, which waits for the device: the step is over by now.
            self.seconds.append(time.perf_counter() - self._started)
            self.losses.append(float(logs["loss"]))
            step, loss, milliseconds = len(self.losses), self.losses[-1], self.seconds[-1] * 1e3
            print(f"step {step:4d}  loss {loss:.4f}  {milliseconds:7.1f} ms", flush=True)


def main() -> None:
    arguments = parse_arguments()
    set_seed(arguments.seed)
    tokenizer = ByT5Tokenizer()
    model = make_model(tokenizer, arguments.layers)
    count = arguments.steps * arguments.batch_size
    dataset = make_dataset(tokenizer, count, arguments.length, arguments.seed)
    recorder = StepRecorder(by_turns=arguments.by_turns)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch_size,
                learning_rate=arguments.learning_rate,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                seed=arguments.seed,
            ),
            train_dataset=dataset,
            callbacks=[recorder],
        )
        trainer.train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {len(recorder.losses)} steps, last loss {recorder.losses[-1]:.4f}")
    if arguments.output:
        report = {"parameters": parameters, "losses": recorder.losses, "step_seconds": recorder.seconds}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
