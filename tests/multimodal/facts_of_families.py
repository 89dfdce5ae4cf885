"""Runs a training step of every family and batch; writes losses, logits and gradients to a file.

    python -m tests.multimodal.facts_of_families FILE FOLDER [family ...]

The hook is on if the environment has ``FACTS_HOOK=1``. Then models are saved in FOLDER, else they are loaded from it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if os.environ.get("FACTS_HOOK") == "1":
    import veomni_hook.install  # noqa: F401

import torch

from tests.multimodal.families import FAMILIES, accepted, batch, batches, model, packed, samples_of_a_row
from veomni_hook.errors import SamplesError
from veomni_hook.multimodal import position_ids

SIDES = ("right", "left")


def step(made: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The loss and every gradient of a training step, and the logits of an evaluation."""
    made.zero_grad()
    loss = made(**inputs).loss
    loss.backward()
    found = {name: each.grad.clone() for name, each in made.named_parameters() if each.grad is not None}
    with torch.no_grad():
        logits = made.eval()(**inputs).logits
    made.train()
    return {"loss": loss.detach(), "logits": logits, **found}


def packing_of(family: str, made: Any) -> tuple[float, float] | str:
    """The largest difference of logits between packed samples and separate ones, and the largest logit.

    Positions of a packed sequence have four rows: that of text begins anew with each sample. An error: its name.
    """
    try:
        return _packed(family, made)
    except SamplesError as error:
        return type(error).__name__


def _packed(family: str, made: Any) -> tuple[float, float]:
    made.eval()
    separate = [_logits(made, accepted(made, batch(family, [sample]))) for sample in samples_of_a_row(family)]
    found = _logits(made, accepted(made, packed(family, position_ids(made.config))))
    made.train()
    truth = torch.cat(separate)
    return (found - truth).abs().max().item(), truth.abs().max().item()


def _logits(made: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return made(**inputs, use_cache=False).logits[0]


def same_when_loaded(folder: Path, made: Any) -> bool:
    """Whether upstream's code loads what was saved, with the same names and values, and nothing of this package."""
    loaded, told = type(made).from_pretrained(folder, output_loading_info=True)
    state, expected = loaded.state_dict(), made.state_dict()
    texts = [each.read_text() for each in folder.glob("*.json")]
    return (
        not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        and state.keys() == expected.keys()
        and all(torch.equal(each, expected[name]) for name, each in state.items())
        and not any("veomni" in text for text in texts)
    )


def main(path: str, saved: str, *families: str) -> None:
    """Write what every step computes, by family, batch and side of the padding."""
    torch.set_num_threads(1)
    found: dict[tuple[str, str, str], dict[str, torch.Tensor]] = {}
    routed: dict[str, set[str]] = {}
    packing: dict[str, tuple[float, float] | str] = {}
    loaded: dict[str, bool] = {}
    for family in families or FAMILIES:
        made = model(family)
        for name, samples in batches(family).items():
            for side in SIDES:
                inputs = accepted(made, batch(family, samples, side=side))
                found[family, name, side] = step(made, inputs)
        packing[family] = packing_of(family, made)
        folder = Path(saved, family)
        if os.environ.get("FACTS_HOOK") == "1":
            from veomni_hook import explain

            routed[family] = {row.op for row in explain(made).rows if row.backend not in ("eager", "-")}
            made.save_pretrained(folder)
        else:
            loaded[family] = same_when_loaded(folder, made)
    torch.save((found, routed, packing, loaded), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
