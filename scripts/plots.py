"""The plots in docs/images, drawn from benchmarks/results: `python -m scripts.plots` writes them anew.

It needs matplotlib (`pip install 'veomni-hook[demo]'`). What is drawn is collected first, without
matplotlib, so that a test can compare it with the numbers that the committed files carry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import svg
from scripts.svg import COLOURS, INK, NAMES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"

STEPS = {
    "Qwen3-8B, 4 layers": "qwen3_8b_step_gpu-cudnn.json",
    "Qwen3-30B-A3B, 4 layers": "qwen3_30b_a3b_step_gpu-cudnn.json",
}
PEERS = ("eager", "compile", "liger", "ours")
FAMILY_SIDES = ("compile", "liger", "ours+compile", "ours")

# What is read from the rows of a bench: the label, the op and the shape.
NORMS = {
    "RMSNorm\n131,072 x 4,096": ("rms_norm", "131072 x 4096"),
    "RMSNorm of heads\n4,194,304 x 128": ("rms_norm", "4194304 x 128"),
    "RMSNorm of gated input\n65,536 x 4,096": ("rms_norm_gated", "gate_before_norm, 65536 x 4096"),
    "Residual and RMSNorm\n131,072 x 4,096": ("add_rms_norm", "131072 x 4096"),
    "Rotary embedding\n16 x 8,192, 32/8 x 128": ("rotary", "16 x 8192 x 32/8 x 128"),
    "Norms and rotary of q, k\n16 x 8,192, 32/8 x 128": ("qk_norm_rotary", "16 x 8192 x 32/8 x 128"),
    "SiLU times up\n16,384 x 12,288": ("gated_mlp", "16384 x 12288"),
}
LOSS = {
    "8,192 x 2,048\nx 151,936": ("linear_cross_entropy", "8192 x 2048 x 151936"),
    "16,384 x 4,096\nx 151,936": ("linear_cross_entropy", "16384 x 4096 x 151936"),
}
EXPERTS = {
    "128 experts, top 8\n2,048 x 768": ("moe_experts", "16384 x 2048 x 768, 128 experts"),
    "512 experts, top 10\n2,048 x 512": ("moe_experts", "16384 x 2048 x 512, 512 experts"),
    "8 experts, top 2\n4,096 x 14,336": ("moe_experts", "8192 x 4096 x 14336, 8 experts"),
}


#: Of the parts of a plan: what they are called together.
PARTS = {
    "weights and their gradients": ("weights", "weights and gradients of other layers", "gradients"),
    "residuals and norms": ("layers", "input_layernorm", "post_attention_layernorm", "model", "embed_tokens"),
    "attention": ("self_attn", "inside of attention", "rotary_emb"),
    "gradients of attention": ("backward pass",),
}


class Plot(NamedTuple):
    """A picture: its title for those who do not see it, its numbers, and what draws them."""

    title: str
    data: Callable[[], Any]
    draw: Callable[[Any, Any], Any]


def step_data() -> dict[str, Any]:
    """Return milliseconds and GiB of each side, by model."""
    found = {}
    for name, file in STEPS.items():
        sides = _read(file)["sides"]
        found[name] = {
            "time": {side: round(sides[side]["step_ms"]) for side in (*PEERS, "floor")},
            "memory": {side: round(sides[side]["extra_gib"], 1) for side in PEERS},
        }
    return found


def families_data() -> list[dict[str, Any]]:
    """Return time and memory of each peer relative to eager, by family, the hook's best families first.

    Families that `families_gpu` has recorded with all sides come from its file, others from the older one.
    """
    rows = {row["family"]: row for row in _read("families-h200.json")["families"]}
    for row in _read("families_gpu-cuda.json")["families"]:
        if "eager" not in row["sides"]:
            continue
        sides = {side: one for side, one in row["sides"].items() if "step_ms" in one}
        values = {key: {side: one[key] for side, one in sides.items()} for key in ("step_ms", "extra_gib")}
        rows[row["family"]] = {"family": row["family"], **values}
    found = []
    for row in rows.values():
        time, memory = (
            {side: _relative(values[side], values["eager"]) for side in FAMILY_SIDES if side in values}
            for values in (row["step_ms"], row.get("extra_gib", {}))
        )
        found.append({"family": row["family"], "time": time, "memory": memory})
    return sorted(found, key=lambda row: (sum(row["time"]["ours"]), row["family"]))


def kernels_data() -> dict[str, Any]:
    """Return the percent of the limit of each peer, by panel and row."""
    bench, experts = _read("bench-cuda.json")["rows"], _read("bench-experts-cuda.json")["rows"]
    limits = {row["limit"] for row in bench if row["op"] == "linear_cross_entropy" and row["share"]}
    own = "its own products" if limits == {"products"} else "a product's rate"
    return {
        "Forward, % of bandwidth": _shares(bench, NORMS, "forward"),
        "Backward, % of bandwidth": _shares(bench, NORMS, "backward"),
        f"Loss, % of {own}": _shares(bench, LOSS, "step"),
        "Experts, % of a product's rate": _shares(experts, EXPERTS, "step", eager="grouped_mm"),
    }


def memory_data() -> dict[str, dict[str, float]]:
    """Return GiB by part at the peak of the longest steps of a model in 80 GB."""
    found = {}
    for case in _read("longest_gpu-cuda.json")["cases"]:
        if case["model"] != "Qwen3-8B" or "parts" not in case:
            continue
        kept = "gradients leave" if case["optimizer"] == "host" else "gradients stay"
        parts = {
            name: sum(case["parts"].get(part, 0) for part in together) for name, together in PARTS.items()
        }
        parts["other"] = case["predicted"] - sum(parts.values())
        found[f"{kept}\n{case['length']:,} tokens"] = {
            name: round(size / 2**30, 1) for name, size in parts.items()
        }
    return found


def draw_step(pyplot: Any, data: Mapping[str, Any]) -> Any:
    """Draw a bar for each side: a row of panels for each model, time on the left and memory on the right."""
    figure, axes = pyplot.subplots(
        len(data), 2, figsize=(8.4, 2.3 * len(data)), layout="constrained", squeeze=False, sharey="row"
    )
    for row, (model, quantities) in zip(axes, data.items(), strict=True):
        for axis, quantity, what, form in zip(
            row, ("time", "memory"), ("step time, ms", "memory, GiB"), ("{:,.0f}", "{:,.1f}"), strict=True
        ):
            axis.set_title(f"{model}: {what}")
            for side, value in quantities[quantity].items():
                look = {"hatch": "////"} if side == "floor" else {}
                bar = axis.barh(
                    NAMES[side], value, 0.72, color=COLOURS[side], edgecolor=INK, linewidth=0.6, **look
                )
                svg.label(axis, bar, [form.format(value)], bold=side == "ours")
            axis.margins(x=0.12)
            axis.set_xticks([])
            axis.tick_params(axis="y", length=0)
            axis.spines["bottom"].set_visible(False)
        row[0].invert_yaxis()
    return figure


def draw_families(pyplot: Any, data: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a row for each family, a mark for each peer where it is relative to eager."""
    marks = {"compile": "s", "liger": "^", "ours+compile": "D", "ours": "o"}
    figure, axes = pyplot.subplots(
        1, 2, figsize=(8.4, 1.2 + 0.3 * len(data)), layout="constrained", sharey=True
    )
    for axis, quantity in zip(axes, ("time", "memory"), strict=True):
        for place, row in enumerate(data):
            for side, (low, high) in row[quantity].items():
                axis.plot(
                    [low, high], [place, place], color=COLOURS[side], linewidth=3, solid_capstyle="round"
                )
                axis.plot(
                    (low + high) / 2, place, marks[side], color=COLOURS[side], markersize=8,
                    markeredgecolor=INK, markeredgewidth=0.6, label=NAMES[side],
                )  # fmt: skip
            if row[quantity]:
                text = " to ".join(f"{value:.2f}" for value in dict.fromkeys(row[quantity]["ours"]))
            else:
                text = "not recorded"
            axis.text(1.02, place, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_xlim(0, 1.5 if quantity == "time" else 1.35)
        axis.set_title(f"{quantity.capitalize()}, eager = 1")
        axis.grid(axis="x")
        axis.tick_params(axis="y", length=0)
        axis.text(
            1.02, -1, NAMES["ours"], transform=axis.get_yaxis_transform(), fontsize=8, fontweight="bold",
            va="center",
        )  # fmt: skip
    axes[0].set_yticks(range(len(data)), [row["family"] for row in data])
    axes[0].set_ylim(len(data) - 0.4, -0.7)
    handles, labels = axes[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    names = [NAMES[side] for side in FAMILY_SIDES if NAMES[side] in named]
    figure.legend([named[name] for name in names], names, loc="outside upper center", ncols=len(names))
    return figure


def draw_kernels(pyplot: Any, data: Mapping[str, Any]) -> Any:
    """Draw a bar for each peer, and rows of them for each op."""
    figure = pyplot.figure(figsize=(8.4, 9.6), layout="constrained")
    axes = figure.subplot_mosaic([[0, 1], [2, 3]], gridspec_kw={"height_ratios": [len(NORMS), len(EXPERTS)]})
    for place, (name, rows) in enumerate(data.items()):
        axis = axes[place]
        axis.set_title(name)
        _grouped(axis, rows)
        if place == 1:
            axis.tick_params(labelleft=False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[side]) for side in PEERS]
    figure.legend(handles, [NAMES[side] for side in PEERS], loc="outside upper center", ncols=len(PEERS))
    return figure


def draw_memory(pyplot: Any, data: Mapping[str, Mapping[str, float]]) -> Any:
    """Draw a bar for each step, divided into the parts of its memory."""
    figure, axis = pyplot.subplots(figsize=(8.4, 2.2), layout="constrained")
    starts = [0.0] * len(data)
    for name, colour in zip([*PARTS, "other"], COLOURS.values(), strict=False):
        sizes = [parts[name] for parts in data.values()]
        bars = axis.barh(
            list(data), sizes, 0.6, left=starts, color=colour, edgecolor=INK, linewidth=0.6, label=name
        )
        texts = [f"{size:.1f}" if size > 2 else "" for size in sizes]
        axis.bar_label(bars, texts, label_type="center", fontsize=8, color=INK)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axis.set_title("GiB at the peak")
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=len(PARTS) + 1)
    return figure


def _grouped(axis: Any, rows: Mapping[str, Mapping[str, float]]) -> None:
    height = 0.8 / len(PEERS)
    for number, side in enumerate(PEERS):
        places = [place + (number - 1.5) * height for place, row in enumerate(rows.values()) if side in row]
        values = [row[side] for row in rows.values() if side in row]
        bars = axis.barh(places, values, height, color=COLOURS[side], edgecolor=INK, linewidth=0.4)
        svg.label(axis, bars, [f"{value}" for value in values], bold=side == "ours")
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_xlim(0, 118)
    axis.set_xticks([0, 25, 50, 75, 100])
    axis.grid(axis="x")
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)


def _read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def _relative(value: float | list[float], base: float) -> list[float]:
    """Return the lower and the upper end of a value, or of a range, relative to a base."""
    ends = value if isinstance(value, list) else [value, value]
    return [round(end / base, 3) for end in ends]


def _shares(
    rows: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, tuple[str, str]],
    part: str,
    eager: str = "eager",
) -> dict[str, dict[str, int]]:
    """Return the percent of the limit of each peer in the rows that are wanted.

    Args:
        rows: of a recorded bench.
        wanted: the op and the beginning of the shape of each row, by what it is called.
        part: `forward`, `backward` or `step`.
        eager: the side that `transformers` runs, where that is not the plainest code.

    Raises:
        ValueError: a row that is wanted is not there.
    """
    sides = {**dict.fromkeys(PEERS, ""), "eager": eager}
    found = {}
    for name, (op, shape) in wanted.items():
        for row in rows:
            if (row["op"], row["part"]) == (op, part) and row["shape"].startswith(shape):
                share = {side: row["share"].get(recorded or side) for side, recorded in sides.items()}
                found[name] = {side: round(100 * value) for side, value in share.items() if value is not None}
                break
        else:
            raise ValueError(f"the results have no {part} of {op}, {shape}: record it with veomni-hook bench")
    return found


PLOTS = {
    "step": Plot(
        "A training step of Qwen3-8B and Qwen3-30B-A3B on an H200: eager, torch.compile, Liger, veomni-hook",
        step_data,
        draw_step,
    ),
    "families": Plot(
        "Step time and memory of models on an H200, relative to eager", families_data, draw_families
    ),
    "memory": Plot(
        "Where the memory of the longest step of Qwen3-8B goes in 80 GB, with offload and tiles",
        memory_data,
        draw_memory,
    ),
    "kernels": Plot(
        "What share of the hardware's limit kernels reach on an H200", kernels_data, draw_kernels
    ),
}


def main() -> None:
    """Write every picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    IMAGES.mkdir(exist_ok=True)
    for name, plot in PLOTS.items():
        data = plot.data()
        with pyplot.rc_context(svg.RC):
            figure = plot.draw(pyplot, data)
            svg.write(figure, IMAGES / f"{name}.svg", plot.title, data)
            pyplot.close(figure)


if __name__ == "__main__":
    main()
