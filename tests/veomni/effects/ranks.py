"""What two processes compute together, beside one: `python -m tests.veomni.effects.ranks SETTING THEIRS PLACE FOLDER...`.

``SETTING`` is one of `SETTINGS`: a sequence that is shared, experts that are shared, or weights that are sharded by
FSDP2 while one process alone has pictures; or ``alone``, which writes what one process computes, and checkpoints, to
``PLACE``. Prints JSON: by folder and batch an empty text, or what is not equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__" or "RANK" in os.environ:
    import veomni_hook.install  # noqa: F401 - in front of transformers, as in a script

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from tests.veomni.effects.batches import of_rank, upstreams

#: What `VEOMNI_PARALLEL` is set to.
SETTINGS = {"sequence": "sp=2", "experts": "ep=2", "sharded": ""}
RANKS = 2
#: Folders whose published checkpoints hold the weights of experts transposed. Under `ep`, transformers from 5.20 on
#: takes every checkpoint for such a one, and so cannot load what `save_pretrained` wrote.
TRANSPOSED = ("qwen3_vl_moe",)
#: Seconds for the folders of a setting.
LIMIT = 900
#: The variable with the place where ranks meet.
MEETING = "EFFECTS_MEETING"


def batches(setting: str, folder: str, kind: str, rank: int) -> dict[str, Any]:
    """What a process gets. Those that share a sequence get the same."""
    known = upstreams(folder, kind)
    pictures = known.get("media", of_rank(0))
    if setting == "sequence":
        return {**{n: known[n] for n in known if n != "text"}, "text": of_rank(0)}
    if setting == "experts":
        return {"text": of_rank(rank)}
    short = {name: value[:, :2] for name, value in of_rank(1).items()}
    return {
        "text": of_rank(rank),
        "media": of_rank(1) if rank else pictures,
        "short": short if rank else of_rank(0),
    }


def numbers(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and all gradients, whole; a mean over processes if there are several."""
    from torch.distributed.tensor import DTensor

    model.train().zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    values = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif gradient is not None and distributed.is_initialized():
            distributed.all_reduce(gradient)
            gradient = gradient / distributed.get_world_size()
        values[f"grad of {name}"] = torch.zeros(parameter.shape) if gradient is None else gradient.clone()
    if distributed.is_initialized():
        distributed.all_reduce(values["loss"])
        values["loss"] /= distributed.get_world_size()
    return values


def alone(folder: str, theirs: Any, place: Path) -> dict[str, Any]:
    """One process: a checkpoint, and by setting and batch the mean of what the ranks get."""
    from tests.veomni.effects.ours import Side

    side = Side(folder, theirs, {})
    (kind, *_) = side.kinds
    model = side.model(kind)
    model.save_pretrained(place / folder)
    if folder in TRANSPOSED:
        _transpose(place / folder / "model.safetensors")
    means: dict[str, Any] = {}
    for setting in SETTINGS:
        shares = [batches(setting, folder, kind, rank) for rank in range(RANKS)]
        for name in shares[0]:
            try:
                values = [numbers(model, share[name]) for share in shares]
                means[f"{setting}/{name}"] = {n: sum(v[n] for v in values) / RANKS for n in values[0]}
            except Exception as error:
                means[f"{setting}/{name}"] = f"{type(error).__name__}: {error}"
    return means


def _transpose(file: Path) -> None:
    """Write the weights of experts as published checkpoints hold them."""
    weights = load_file(file)
    for name in weights:
        if ".experts." in name:
            weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, file, {"format": "pt"})


def shared(setting: str, folder: str, theirs: Any, expected: Any, place: Path) -> dict[str, str]:
    """Two processes: what is not equal, by batch."""
    from tests.veomni.effects.ours import Side, unequal

    side = Side(folder, theirs, {})
    (kind, *_) = side.kinds
    # The checkpoint is loaded as a script loads it.
    model = getattr(side.module, kind).from_pretrained(place / folder, attn_implementation="eager")
    if setting == "sharded":
        _shard(model)
    results = {}
    for name, batch in batches(setting, folder, kind, distributed.get_rank()).items():
        wanted = expected[f"{setting}/{name}"]
        if isinstance(wanted, str):
            results[name] = f"one process: {wanted}"
            continue
        try:
            results[name] = unequal(wanted, numbers(model, batch))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:400]
    return results


def _shard(model: nn.Module) -> None:
    """As trainers do it: a unit for each module that is not to be split."""
    from torch.distributed.fsdp import fully_shard

    units = set(model._no_split_modules or ())
    for module in reversed([*model.modules()]):  # inner units first
        if type(module).__name__ in units:
            fully_shard(module)
    fully_shard(model)


def launched(theirs: str, place: str, folders: Sequence[str]) -> dict[str, Any]:
    """Run one process, then the ranks of each setting: by setting and folder what `shared` returned."""
    command = [sys.executable, "-m", "tests.veomni.effects.ranks"]
    subprocess.run([*command, "alone", theirs, place, *folders], check=True, timeout=LIMIT, stdout=sys.stderr)
    results: dict[str, Any] = {}
    for setting in SETTINGS:
        told, left = {}, [*folders]
        while left:
            told |= _ranks([*command, setting, theirs, place, *left], setting)
            # A rank may have been aborted by its collectives; the next folders get new ones.
            if lost := next((folder for folder in left if folder not in told), None):
                told[lost] = {"": "the processes were aborted or hung"}
            left = [folder for folder in left if folder not in told]
        results[setting] = told
    return results


def _ranks(command: Sequence[str], setting: str) -> dict[str, Any]:
    """What the first of several ranks printed, a line for each folder."""
    with tempfile.TemporaryDirectory() as meeting:
        shared_environment = {
            **os.environ, "VEOMNI_PARALLEL": SETTINGS[setting], "WORLD_SIZE": str(RANKS), "MASTER_PORT": "0",
            "MASTER_ADDR": "127.0.0.1", MEETING: f"file://{meeting}/store",
        }  # fmt: skip
        with (Path(meeting) / "told").open("w+") as told:
            ranks = [
                subprocess.Popen(
                    command,
                    env={**shared_environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=sys.stderr if rank else told,
                )
                for rank in range(RANKS)
            ]
            ends = time.monotonic() + LIMIT
            for rank in ranks:
                try:
                    rank.wait(max(ends - time.monotonic(), 5))
                except subprocess.TimeoutExpired:
                    rank.kill()
            told.seek(0)
            lines = [json.loads(line) for line in told if line.startswith("{")]
    return {folder: result for line in lines for folder, result in line.items()}


def main() -> None:
    torch.set_num_threads(1)
    setting, file, place, *folders = sys.argv[1:]
    theirs = torch.load(file)
    if setting == "all":
        print(json.dumps(launched(file, place, folders)))
        return
    alone_file = Path(place) / "alone.pt"
    if setting == "alone":
        torch.save({folder: alone(folder, theirs[folder], Path(place)) for folder in folders}, alone_file)
        return
    distributed.init_process_group(
        "gloo", init_method=os.environ[MEETING], rank=int(os.environ["RANK"]), world_size=RANKS,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    expected = torch.load(alone_file)
    for folder in folders:
        try:
            result = shared(setting, folder, theirs[folder], expected[folder], Path(place))
        except Exception as error:
            result = {"": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps({folder: result}), flush=True)
        if any("gloo" in lack for lack in result.values()):
            break  # another rank was aborted
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
