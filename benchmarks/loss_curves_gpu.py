"""200 steps of a small model on real text, without and with the hook: `python -m benchmarks.loss_curves_gpu`.

Python's own standard library is the text; a token is a word or a sign, by its hash. Each side trains in an
interpreter of its own from the same weights and batches. The curves have to stay within 1e-2 of each other.

Where a router chooses, a difference in the last bit can send a token to another expert, and curves drift
apart whatever computes them. How far is measured beside it: upstream's loop over experts against its
grouped products. At a learning rate of 3e-4, bfloat16 curves of experts were up to 6e-2 apart on an H200;
so it is 1e-4 for them.

`--precision float8` compares 1,000 steps in bfloat16 with the same in float8, and with another seed of the
weights: in means of 50 steps, float8 has to be closer than the other seed.

`--device cpu --steps N --batch N` tries a few steps; only a whole run on a GPU is recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import fmean

from benchmarks._record import RESULTS

LENGTH, VOCABULARY = 512, 32_768
#: Steps and sequences in each, by ``--precision``: as many as the text has tokens for.
RUNS = {"": (200, 8), "float8": (1000, 2), "mxfp8": (1000, 2)}
TOLERANCE, WINDOW = 1e-2, 50
_OF_ROUTERS = ("eager", "loop", "ours")
SIDES = {"qwen3": ("eager", "ours"), "qwen3_moe": _OF_ROUTERS, "qwen3_next": _OF_ROUTERS}
RATES = {"qwen3": 3e-4, "qwen3_moe": 1e-4, "qwen3_next": 1e-4}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
#: The auxiliary loss is part of the loss where there are routers.
OF_EXPERTS = {
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "output_router_logits": True,
}
#: Three layers of linear attention and one of full attention, and an expert that every token takes.
OF_LINEAR_ATTENTION = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 256,
}
MORE: dict[str, dict[str, object]] = {
    "qwen3": {},
    "qwen3_moe": OF_EXPERTS,
    "qwen3_next": {**OF_EXPERTS, **OF_LINEAR_ATTENTION},
}
_TOKEN = re.compile(r"\w+|[^\w\s]|\n\s*")


def main() -> None:
    """Run both sides and record the curves; the exit status says whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="qwen3", choices=tuple(SIDES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kernels", default="auto", help="what ours runs with")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="", choices=tuple(RUNS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    options = parser.parse_args()
    whole = RUNS[options.precision]
    options.steps, options.batch = options.steps or whole[0], options.batch or whole[1]
    if options.worker is not None:
        print(json.dumps(train(options)))
        return
    curves = {}
    sides = ("ours", "other seed", options.precision) if options.precision else SIDES[options.model]
    for name in sides:
        command = [sys.executable, "-m", "benchmarks.loss_curves_gpu", "--worker", name]
        command += ["--model", options.model, "--dtype", options.dtype, "--kernels", options.kernels]
        command += ["--device", options.device, "--steps", str(options.steps), "--batch", str(options.batch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        curves[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {curves[name]['losses'][0]:.4f} -> {curves[name]['losses'][-1]:.4f}", flush=True)
    window = WINDOW if options.precision else 1
    apart = {name: difference(curves[sides[0]], curves[name], window) for name in sides[1:]}
    print("largest difference:", ", ".join(f"{name} {each:.2e}" for name, each in apart.items()))
    far = apart[options.precision] > apart["other seed"] if options.precision else apart["ours"] > TOLERANCE
    if (options.device, options.steps, options.batch) != ("cuda", *whole):
        sys.exit(far)
    from veomni_hook.tools.bench.record import circumstances, write

    more = {"model": options.model, "dtype": options.dtype, "kernels": options.kernels}
    more |= {"learning_rate": RATES[options.model], "largest_difference": apart, "sides": curves}
    target = RESULTS / f"loss_curves_gpu-{options.model}-{options.precision or options.dtype}.json"
    write(circumstances("loss_curves_gpu", "cuda", **more), target)
    sys.exit(far)


def difference(one: dict[str, list[float]], other: dict[str, list[float]], window: int) -> float:
    """The largest difference of two curves' means of ``window`` steps."""
    means = (
        [fmean(side["losses"][i : i + window]) for i in range(0, len(side["losses"]), window)]
        for side in (one, other)
    )
    return max(abs(a - b) for a, b in zip(*means, strict=True))


def train(options: argparse.Namespace) -> dict[str, object]:
    """Train in this process."""
    name, model_type, dtype = options.worker, options.model, options.dtype
    hooked = name not in ("eager", "loop")
    if hooked:
        from veomni_hook import activate

        activate(kernels=options.kernels, precision=name if name in RUNS else "")
        # Batches are so small that casts would not pay.
        from veomni_hook.kernels.moe_experts import float8

        float8.ROWS = 1
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(int(name == "other seed"))
    config = AutoConfig.for_model(model_type, **{**SIZES, **MORE[model_type]})
    model = AutoModelForCausalLM.from_config(config).to(options.device, getattr(torch, dtype)).train()
    if name == "loop":
        model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[model_type])
    shape = (options.steps, options.batch, LENGTH)
    tokens = torch.tensor(text_tokens(math.prod(shape))).view(shape).to(options.device)
    losses = []
    for ids in tokens:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    facts: dict[str, object] = {"losses": [loss.item() for loss in losses]}
    if hooked:
        import veomni_hook

        facts["kernels"] = str(veomni_hook.explain(model)).splitlines()
    return facts


def text_tokens(count: int) -> list[int]:
    """The first ``count`` tokens of the standard library's modules, in the order of their names."""
    found: list[int] = []
    known: dict[str, int] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for word in _TOKEN.findall(path.read_text(encoding="utf-8", errors="replace")):
            if word not in known:
                digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
                known[word] = int.from_bytes(digest, "little") % VOCABULARY
            found.append(known[word])
        if len(found) >= count:
            return found[:count]
    raise SystemExit(f"the standard library has {len(found)} tokens, {count} are needed")


if __name__ == "__main__":
    main()
