"""Compiles what a model's first training step compiles, by steps of the model with few layers.

The caller activates the hook before: what runs is then what a training script runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from veomni_hook import accelerator
from veomni_hook.tools.cli.cache.fewer_layers import nodes, shortened
from veomni_hook.tools.cli.inputs.targets import suggestion
from veomni_hook.tools.cli.usage import UsageError
from veomni_hook.tools.facts import Facts

__all__ = ["built", "compiled", "config_of", "gpu"]

#: Whose models take token ids with labels of their shape; the first that has a model is taken.
_AUTO = [f"AutoModelFor{what}" for what in ("CausalLM", "ImageTextToText", "Seq2SeqLM", "MaskedLM")]
_TOKENS = 4096
_NAME_A_FOLDER = "name the folder of a model: not all types have a default config that works"


def gpu() -> str:
    """Return the torch device type that kernels are compiled for.

    Raises:
        UsageError: this machine has no GPU of Triton's, or no Triton.
    """
    device = accelerator.best()
    if device == "cuda" and find_spec("triton") is not None:
        return device
    lack = "Triton" if device == "cuda" else "GPU that Triton knows"
    raise UsageError(
        f"there is no {lack} here: kernels are compiled on the machine that trains, for its GPU",
        where="veomni-hook cache warm --kernels",
        fix="run this command in the job, before the training script",
    )


def config_of(name: str) -> Any:
    """Return the config of a model type, or of a folder, a file or a model in the hub's cache.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if name in CONFIG_MAPPING:
        try:
            return AutoConfig.for_model(name)
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())  # it may be of several lines
            raise UsageError(
                f"transformers makes no config of this type alone: {told}", where=name, fix=_NAME_A_FOLDER
            ) from error
    try:
        # Without this False, transformers asks on the terminal whether a model's own code may run.
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if os.path.exists(name):
            fix = "name a folder with a config.json whose model_type transformers knows"
            told = str(error).strip().partition("\n")[0]
            raise UsageError(f"its config cannot be read: {told}", where=name, fix=fix) from error
        raise UsageError(
            f"{name!r} is no model type, no file or folder, and no model in the hub's cache",
            where=f"transformers {__version__}",
            fix=suggestion(name, set(CONFIG_MAPPING.keys())),
        ) from error


def built(config: Any, device: str) -> Any:
    """Return the model of a config, with random weights; ``config`` stays as it is.

    Raises:
        UsageError: transformers has no language model for it.
    """
    import torch
    import transformers

    config = deepcopy(config)  # what transformers writes into it looks like a user's choice
    for node in nodes(config):
        vars(node)["use_cache"] = False  # as trainers do
    autos = [getattr(transformers, name) for name in _AUTO]
    auto = next((auto for auto in autos if type(config) in auto._model_mapping), None)
    if auto is None:
        fix = "name the type, or the folder, of a model that is trained on text"
        raise UsageError(
            f"transformers has no language model for {type(config).__name__}", where=", ".join(_AUTO), fix=fix
        )
    dtype = config.get_text_config(decoder=True).dtype or config.dtype or torch.bfloat16
    with torch.device(device):
        return auto.from_config(config, dtype=dtype)


def compiled(config: Any, tokens: Sequence[int], device: str) -> Facts:
    """Run steps of the model with few layers, and return what they compiled, as JSON-ready values.

    Args:
        config: the model's.
        tokens: of a step, in one sequence and in two; none: 4096, or as many as the model has positions.
        device: where they run, as a torch device type.

    Raises:
        UsageError: transformers has no language model for the config, or the GPU's memory is too small.
    """
    import torch

    began = time.perf_counter()
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or _TOKENS
    lengths = [*tokens] or [min(_TOKENS, most)]
    fewer, layers = shortened(config, _on_meta)
    folder = _cache_folder()
    with _counted(folder) as counts:
        try:
            model = built(fewer, device)
            for length in lengths:
                # Triton compiles another kernel where a number, as that of sequences, is 1.
                _step(model, 1, length)
                _step(model, 2, -(-length // 2))
        except torch.OutOfMemoryError as error:
            kept = ", ".join(f"{few} of {all_} layers" for few, all_ in layers.values()) or "all layers"
            raise UsageError(
                f"the GPU has too little memory for a training step with {kept}",
                where=f"{type(config).__name__}, {max(lengths)} tokens",
                fix="end what else runs on this GPU, or name fewer tokens: --tokens 1024",
            ) from error
    seconds = round(time.perf_counter() - began, 1)
    return {"layers": layers, "tokens": lengths, **counts, "seconds": seconds, "cache": folder}


def _on_meta(config: Any) -> Any:
    try:
        return built(config, "meta")
    except (UsageError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise UsageError(
            f"transformers makes no model of this config: {type(error).__name__}: {error}",
            where=type(config).__name__,
            fix=_NAME_A_FOLDER,
        ) from error


def _step(model: Any, sequences: int, length: int) -> None:
    import torch

    words = model.get_input_embeddings().weight.shape[0]
    # From the middle: at both ends are tokens that stand for padding or images.
    ids = torch.randint(words // 4, words // 2, (sequences, length), device=model.device)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, labels=ids)


@contextmanager
def _counted(folder: str) -> Iterator[dict[str, int | None]]:
    """Count what Triton compiles in the block, and what it finds in ``folder``, its cache."""
    import triton

    counts: dict[str, int | None] = {}
    hits: list[bool] = []
    if not hasattr(triton, "knobs"):  # before 3.4, Triton does not say what it finds
        stored = _stored(folder)
        yield counts
        counts.update(compiled=_stored(folder) - stored, found=None)
        return
    knobs = triton.knobs.compilation
    listener, knobs.listener = knobs.listener, lambda *, cache_hit, **_: hits.append(cache_hit)
    try:
        yield counts
    finally:
        knobs.listener = listener
    counts.update(compiled=hits.count(False), found=hits.count(True))


def _stored(folder: str) -> int:
    return len([*Path(folder).glob("*/__grp__*")])


def _cache_folder() -> str:
    import triton

    if hasattr(triton, "knobs"):
        return str(triton.knobs.cache.dir)
    return os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
