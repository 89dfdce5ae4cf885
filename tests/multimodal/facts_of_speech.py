"""Print facts about one family's model as JSON: built, loaded, trained and saved in this process.

Arguments: the family, a folder of checkpoints, the name of the one to save, and maybe ``silent`` for a
configuration that asks for no speech. ``VEOMNI_SPEECH`` and ``VEOMNI_HOOK`` say what is patched.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import veomni_hook.install  # noqa: F401
from tests.multimodal.omni import config, top_class

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_warning()
transformers.logging.disable_progress_bar()


class Kept(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self, name: str, level: int) -> None:
        super().__init__(level)
        self.said: list[str] = []
        logging.getLogger(name).addHandler(self)
        logging.getLogger(name).setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def batch() -> dict[str, torch.Tensor]:
    """Return five tokens and one more sequence, with labels."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 3]])
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def trained(model: Any) -> dict[str, Any]:
    """One training step with transformers' Trainer: the loss, and the weights that it changed."""
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    rows = [{name: each[row] for name, each in batch().items()} for row in range(2)]
    arguments = transformers.TrainingArguments(
        os.path.join(sys.argv[2], "trainer"), max_steps=1, per_device_train_batch_size=2, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    done = transformers.Trainer(model, arguments, train_dataset=rows).train()
    changed = [name for name, each in model.named_parameters() if not torch.equal(each, before[name])]
    return {"loss": done.training_loss, "changed": sorted({name.split(".")[0] for name in changed})}


def total(model: Any) -> float:
    """The sum of the weights of the part that is always built."""
    return sum(each.double().sum().item() for _, each in sorted(model.thinker.state_dict().items()))


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result, or the error as text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def generated(model: Any, **options: Any) -> Any:
    """The generated tokens, or the error."""
    ids = batch()["input_ids"][:1]
    speakers = {"speaker": "tiny"} if hasattr(model, "speaker_map") else {}
    result = attempt(
        model.generate, ids, thinker_max_new_tokens=3, thinker_do_sample=False, **speakers, **options
    )
    return result.tolist() if isinstance(result, torch.Tensor) else str(result)


def main() -> None:
    """Print the facts."""
    family, folder = sys.argv[1], Path(sys.argv[2])
    ours, theirs = Kept("veomni_hook", logging.INFO), Kept("transformers", logging.WARNING)
    silent = {"enable_audio_output": False} if "silent" in sys.argv else {}
    made, top = config(family, **silent), top_class(family)
    torch.manual_seed(0)
    model = top(made)
    state = torch.random.get_rng_state().sum().item()
    top(made)
    facts: dict[str, Any] = {
        "children": [name for name, _ in model.named_children()],
        "has_talker": model.has_talker,
        "given": made.enable_audio_output,
        "own": model.config.enable_audio_output,
        "shared": model.config.thinker_config is model.thinker.config,
        "random": state,
        "weights": total(model),
        "absent": sorted(set(model._no_split_modules) - {type(each).__name__ for each in model.modules()}),
        "said": [line for line in ours.said if "speech" in line],
    }
    if hasattr(model, "speaker_map"):
        model.speaker_map["tiny"] = {"bos_token": 1}
    asked = "return_audio" in inspect.signature(model.generate).parameters
    facts["text"] = generated(model, **({"return_audio": False} if asked else {"generation_mode": "text"}))
    facts["speech"] = generated(model, **({"return_audio": True} if asked else {"generation_mode": "audio"}))
    if not model.has_talker and "silent" not in sys.argv:
        facts["default"] = [generated(model), generated(model, return_audio=False)]
    if "forward" in vars(top):
        inputs = batch()
        out, direct = model(**inputs), model.thinker(**inputs)
        facts["logits"] = torch.equal(out.logits, direct.logits) and torch.equal(out.loss, direct.loss)
        facts["signature"] = str(inspect.signature(model.forward)) == str(
            inspect.signature(model.thinker.forward)
        )
        facts["trained"] = trained(model)
    facts["line"] = [line for line in ours.said if "patched at" in line]
    saved = folder / sys.argv[3]
    model.save_pretrained(saved)
    facts["files"] = sorted(each.name for each in saved.iterdir())
    if hasattr(model, "speaker_map") and "spk_dict.pt" not in facts["files"]:
        torch.save(model.speaker_map, saved / "spk_dict.pt")  # which upstream reads and does not write
    facts["saved"] = json.loads((saved / "config.json").read_text())["enable_audio_output"]
    for source in sorted(folder.glob("saved-*")):
        theirs.said.clear()
        found = top.from_pretrained(source)
        facts[source.name] = {
            "children": [name for name, _ in found.named_children()],
            "weights": total(found),
            "reported": [line for line in theirs.said if "talker" in line or "wav" in line],
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
