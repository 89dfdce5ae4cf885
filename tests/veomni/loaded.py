"""Build models, configs and a processor by VeOmni's own loader, registered as docs/veomni.md says.

Prints what it got as one line of JSON. The configs are `qwen3_moe_patches`, as `migrate` reduces VeOmni's, and
`registry_patches` of the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tests.docs.blocks import blocks

DOCUMENT = Path(__file__).parents[2] / "docs" / "veomni.md"


def registered() -> int:
    """Run the document's blocks that register something in VeOmni's model registries."""
    chosen = [
        code
        for _, code, _ in blocks(DOCUMENT.read_text("utf-8"))
        if "register_models" in code or "REGISTRY" in code
    ]
    scope: dict[str, Any] = {}
    for code in chosen:
        exec(compile(code, str(DOCUMENT), "exec", dont_inherit=True), scope)
    return len(chosen)


def built(config: Any, weights: str | None = None) -> Any:
    from veomni.arguments.arguments_types import OpsImplementationConfig
    from veomni.models.auto import build_foundation_model

    fields = OpsImplementationConfig.__dataclass_fields__
    eager = {name: "eager" for name in fields if name.endswith("_implementation")}
    ops = OpsImplementationConfig(**eager | {"qat_implementation": "none"})
    return build_foundation_model(
        config, weights_path=weights, torch_dtype="float32", init_device="cpu", ops_implementation=ops
    )


def saved(folder: str, values: Any) -> str:
    values.save_pretrained(folder)
    return folder


def models() -> dict[str, Any]:
    """A model from a folder with its config, the same from a folder with its weights, and VeOmni's own."""
    import transformers

    import veomni_hook
    from tests.veomni.configurations import CONFIGURATIONS
    from tests.veomni.inputs import inputs
    from tests.veomni.sides import calls, differences, model, side, weighted

    config = transformers.Qwen3MoeConfig(
        **CONFIGURATIONS["qwen3_moe"][2], architectures=["Qwen3MoeForCausalLM"]
    )
    first = weighted(built(saved("qwen3_moe", config)))
    loaded = built("qwen3_moe", saved("qwen3_moe", first)).train()
    state = first.state_dict()
    generated = side("qwen3_moe", "gpu")
    theirs = model(generated, "qwen3_moe", state=state)
    given = {"packed": inputs("qwen3_moe", "Qwen3MoeForCausalLM")["packed"]}
    numbers = zip(calls(theirs, generated, given), calls(loaded, side("qwen3_moe"), given), strict=True)
    rows = veomni_hook.explain(loaded).rows
    dense = built(
        saved(
            "qwen3",
            transformers.Qwen3Config(**CONFIGURATIONS["qwen3"][2], architectures=["Qwen3ForCausalLM"]),
        )
    )
    return {
        "class": f"{type(loaded).__module__}.{type(loaded).__name__}",
        "attached": sorted(name for name in vars(type(loaded)) if "onvert" in name),
        "same weights": all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items()),
        "differences": [differences(one, other) for (_, one), (_, other) in numbers],
        "ran": sorted({row.op for row in rows if row.backend == "torch"}),
        "dense": type(dense).__module__,
    }


def others() -> dict[str, Any]:
    """Configs and processors: those of VeOmni's own entries, those of ours, and those without an entry."""
    import transformers
    from veomni.models.loader import MODEL_PROCESSOR_REGISTRY, get_model_config, get_model_processor

    logging.set_verbosity_error()
    Path("speech").mkdir()
    Path("speech", "vocab.json").write_text(
        json.dumps({word: n for n, word in enumerate(["<pad>", "<unk>", "|", "a"])})
    )
    tokens = transformers.Wav2Vec2CTCTokenizer("speech/vocab.json")
    folder = saved("speech", transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), tokens))
    without = get_model_processor(folder)
    MODEL_PROCESSOR_REGISTRY["Wav2Vec2Processor"] = lambda: transformers.Wav2Vec2Processor
    omni = MODEL_PROCESSOR_REGISTRY["Qwen2_5OmniProcessor"]()
    found = {
        "config of ours": get_model_config("qwen3"),
        "config of VeOmni": get_model_config(saved("omni", transformers.Qwen2_5OmniConfig())),
        "processor without an entry": without,
        "processor of ours": get_model_processor(folder),
    }
    hooked = {name: [type(one).__module__, one.hooked()] for name, one in found.items()}
    return hooked | {
        "processor of the document": [omni.__module__, "veomni_inputs" in omni.__call__.__code__.co_varnames]
    }


def main() -> None:
    torch.set_num_threads(1)
    count = registered()
    from tests.veomni.sides import prepare

    prepare()
    print(json.dumps({"blocks": count, **models(), **others()}))


if __name__ == "__main__":
    main()
