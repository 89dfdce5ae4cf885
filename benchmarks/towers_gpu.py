"""Vision towers alone, and training steps of multimodal models: upstream, torch.compile, Liger, ours.

    python -m benchmarks.towers_gpu                       # all cases
    python -m benchmarks.towers_gpu "Qwen3-VL-8B"         # those whose names begin so

All sides of a case alternate in one run, as in `families_gpu`. "+metadata": batches come from
`veomni_hook.multimodal.collate_metadata`. A tower alone runs forward and backward on patches of 8 images;
its "loss" is the mean of its output. Shapes are real; text models have few layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks._families import Family, shape
from benchmarks._record import RESULTS, record
from benchmarks.families_gpu import ROUNDS, Process, line, measured

PROCESSES = {
    "upstream": ("eager", "eager+metadata", "compile"),
    "liger": ("liger",),
    "hook": ("ours", "ours+metadata"),
}
SIDES = tuple(side for sides in PROCESSES.values() for side in sides)
TARGET = "towers_gpu-cuda.json"

_IMAGES = [[1, 74, 74]] * 8
_QWEN25_SIGHT = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
}  # fmt: skip
_QWEN3_SIGHT = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
_SOUND = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
_SECONDS_30 = 3000
_SECTIONS = {"rope_type": "default", "rope_theta": 1e6}
_QWEN25 = {"rope_parameters": {**_SECTIONS, "mrope_section": [16, 24, 24]}}
_QWEN3 = {"rope_parameters": {**_SECTIONS, "mrope_section": [24, 20, 20], "mrope_interleaved": True}}
_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}


def case(kind: str, text: dict[str, Any], sight: dict[str, Any], **more: Any) -> Family:
    """Return a case: a model, its configuration, what its batch holds, and the tokens of text."""
    given = {"text_config": text, "vision_config": sight, **more}
    return Family(kind, given, batch=2, length=2048)


_TINY = shape(3584, 1024, 1, "28 4 128", 152_064)
CASES = {
    "Qwen2.5-VL-7B tower": case("qwen2_5_vl", _TINY | _QWEN25, _QWEN25_SIGHT, tower=True, images=_IMAGES),
    "Qwen3-VL tower": case(
        "qwen3_vl",
        shape(4096, 1024, 1, "32 8 128", 151_936) | _QWEN3,
        _QWEN3_SIGHT,
        tower=True,
        images=_IMAGES,
    ),
    "Qwen3-VL-8B": case(
        "qwen3_vl", shape(4096, 12288, 3, "32 8 128", 151_936) | _QWEN3, _QWEN3_SIGHT, images=_IMAGES
    ),
    "Qwen3-VL-30B-A3B": case(
        "qwen3_vl_moe",
        shape(2048, 6144, 3, "32 4 128", 151_936) | _EXPERTS | _QWEN3,
        _QWEN3_SIGHT | {"out_hidden_size": 2048},
        images=_IMAGES,
    ),
    "Qwen3-Omni-30B-A3B thinker": case(
        "qwen3_omni_moe_thinker",
        shape(2048, 768, 3, "32 4 128", 152_064) | _EXPERTS | _QWEN3,
        _QWEN3_SIGHT | {"depth": 1, "out_hidden_size": 2048, "deepstack_visual_indexes": []},
        audio_config=_SOUND | {"output_dim": 2048, "num_mel_bins": 128},
        sounds=[_SECONDS_30] * 8,
    ),
}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="beginnings of names")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    sides = options.sides.split(",")
    worker = "benchmarks._tower_worker"
    processes = {
        name: Process("auto" if name == "hook" else "none", options.device, worker)
        for name, own in PROCESSES.items()
        if set(own) & set(sides)
    }
    for name, each in CASES.items():
        if any(name.startswith(one) for one in options.cases or [""]):
            facts = measured(each, processes, sides, trained=PROCESSES, rounds=options.rounds, together=False)
            print(line(name, facts), flush=True)
            seen = [f"{len(each.fields[key])} {key}" for key in ("images", "sounds") if key in each.fields]
            shape = f"{', '.join(seen)}, {each.batch} x {each.length} of text"
            row = {"case": name, "shape": shape, "sides": facts}
            record("towers_gpu", options.device, options.out, CASES, row)
    for process in processes.values():
        process.end()


if __name__ == "__main__":
    main()
