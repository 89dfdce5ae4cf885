"""Print what the processors of both Omni families make of empty lists and of ``audios=``, as JSON.

The tokenizer and the feature extractor are real. Those of images and videos need torchvision, so stand-ins
record whether they are asked.
"""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

import veomni_hook.install  # noqa: F401

warnings.simplefilter("ignore")
PROCESSORS = {"qwen2_5_omni": "Qwen2_5OmniProcessor", "qwen3_omni_moe": "Qwen3OmniMoeProcessor"}
NAMES = ("image", "audio", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of two words and the special tokens."""
    special = {f"{name}_token": f"<{name}>" for name in NAMES}
    vocabulary = {word: number for number, word in enumerate(["<pad>", "look", "hear", *special.values()])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<pad>", extra_special_tokens=special
    )


class Recorder:
    """A stand-in for the processor of images or videos."""

    merge_size = temporal_patch_size = 2
    model_input_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def fetch_images(self, images: Any) -> Any:
        """Return what is given; mixins call this before the processor."""
        return images

    fetch_videos = fetch_images

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(str((args, kwargs)))
        raise RuntimeError("asked for an image or a video")


def made(family: str) -> Any:
    """Return a processor of a family; its ``__init__`` checks the types of its parts, so it is not called."""
    kind = getattr(import_module(f"transformers.models.{family}.processing_{family}"), PROCESSORS[family])
    processor = object.__new__(kind)
    words = tokenizer()
    processor.tokenizer, processor.chat_template = words, None
    processor.feature_extractor = WhisperFeatureExtractor(
        feature_size=8, n_fft=64, hop_length=32, chunk_length=1
    )
    processor.image_processor, processor.video_processor = Recorder(), Recorder()
    processor.n_window = 50
    for name in NAMES:
        setattr(processor, f"{name}_token", getattr(words, f"{name}_token"))
        if name in ("image", "audio", "video"):
            setattr(processor, f"{name}_token_id", words.convert_tokens_to_ids(f"<{name}>"))
    return processor


def attempt(processor: Any, **inputs: Any) -> Any:
    """What a call returns, in a form that can be compared, or the error."""
    try:
        found = processor(return_tensors="np", **inputs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {name: np.asarray(value).round(4).tolist() for name, value in sorted(found.items())}


def main() -> None:
    """Print the facts."""
    sound = np.sin(np.arange(800, dtype=np.float32))
    words, hears = ["look look", "hear look"], ["<audio> hear"]
    facts = {}
    for family in PROCESSORS:
        one = made(family)
        facts[family] = {
            "none": attempt(one, text=words),
            "empty": attempt(one, text=words, images=[], videos=(), audio=[]),
            "audio": attempt(one, text=hears, audio=[sound], sampling_rate=16000),
            "audios": attempt(one, text=hears, images=[], audios=[sound], sampling_rate=16000),
            "no audios": attempt(one, text=words, audios=[]),
            "both": attempt(one, text=hears, audio=[sound], audios=[sound]),
            "image": attempt(one, text=["<image>"], images=[np.zeros((3, 8, 8))], videos=[]),
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
