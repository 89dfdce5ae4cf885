"""The report of the demo as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from veomni_hook.cli import output
from veomni_hook.cli.demo import turns

WIDTH = 80
SHOWN_STEPS = 6
MEBIBYTE = 2**20


def show(report: dict[str, Any], script: Path) -> None:
    """Print the report for a reader; `script` is the training script."""
    machine = f"transformers {report['transformers']}"
    if "torch" in report:
        machine += f", torch {report['torch']}, {report['device_name']}"
        if report["device"] == "cpu":
            machine += f" ({report['threads']} threads)"
    output.emit(f"veomni-hook demo: {machine}\n")
    for name in report["parts"]:
        output.emit("\n")
        match name:
            case "training":
                _training(report[name], script)
            case "vocabulary":
                _vocabulary(report[name])
            case "experts":
                _experts(report[name])
            case "imports":
                _imports(report[name])
    said = [name for name in ("training", "vocabulary", "experts") if name in report]
    if said and not report["equal"]:
        bad = " and ".join(name for name in said if not report[name]["equal"])
        output.emit("\n")
        _say(f"The hook failed in: {bad}. See the lines above.", "")


def _training(found: dict[str, Any], script: Path) -> None:
    plain, hooked = found["plain"]["losses"], found["hooked"]["losses"]
    output.emit_heading("Training: one script, without and with the hook")
    _say(
        f"{_relative(script)}, the same file both times: transformers' Trainer and a Qwen3 with "
        f"{found['plain']['parameters']:,} parameters and {len(plain)} optimizer steps. "
        "The two runs alternated step by step."
    )
    output.emit("\n")
    shared = range(min(len(plain), len(hooked)))
    chosen = sorted({round(i * (len(shared) - 1) / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)})
    output.emit("    step   loss without   loss with the hook   relative difference\n")
    for i in chosen if shared else ():
        numbers = f"{plain[i]:12.5f}   {hooked[i]:18.5f}   {found['differences'][i]:19.1e}"
        output.emit(f"    {i + 1:4}   {numbers}\n")
    output.emit("\n")
    verdict = "equal" if max(found["differences"]) <= found["tolerance"] else "NOT EQUAL"
    if len(plain) != len(hooked):
        verdict += f": {len(plain)} steps without the hook, {len(hooked)} with it"
    largest = f"largest relative difference {max(found['differences']):.1e}, limit {found['tolerance']:.0e}"
    _field("losses", f"{verdict} ({largest})")
    _time(found["step_time"], more="--steps 60")
    _patched(found)


def _patched(found: dict[str, Any]) -> None:
    patches = found["patches"]
    if not found["patched_sources"]:
        _field("patched", f"NOTHING: {patches['reason'] or 'the training wrote no patched source'}")
        return
    count = len(patches["applied"])
    _field("patched", f"{count} place{'s' * (count != 1)} of {found['module'].rpartition('.')[2]}:")
    for patch in patches["applied"]:
        _say(f"{patch['target']}: {patch['reason']}", " " * 15, " " * 17)
    _field("to see it", f"veomni-hook diff {found['module'].split('.')[2]}")


def _vocabulary(found: dict[str, Any]) -> None:
    config = found["config"]
    output.emit_heading(f"A real vocabulary: Qwen3 with {config['vocab_size']:,} tokens")
    _say(
        f"A training step (forward and backward) of {_size(found)}. The hook computes the loss in "
        "chunks, so that the logits of all tokens are never in memory at once."
    )
    _stepped(found)


def _experts(found: dict[str, Any]) -> None:
    config = found["config"]
    output.emit_heading(f"A mixture of experts: Qwen3-MoE with {config['num_experts']} experts a layer")
    _say(
        f"A training step (forward and backward) of {_size(found)}; each token goes to "
        f"{config['num_experts_per_tok']} experts. Without the hook transformers runs its "
        f"implementation {found['experts_implementation']!r}, which is its own choice here."
    )
    _stepped(found)


def _size(found: dict[str, Any]) -> str:
    config = found["config"]
    layers = config["num_hidden_layers"]
    return (
        f"{found['tokens']:,} tokens, hidden size {config['hidden_size']:,}, "
        f"{layers} layer{'s' * (layers > 1)}, {found['parameters']:,} parameters, {found['dtype']}"
    )


def _stepped(found: dict[str, Any]) -> None:
    plain, hooked = found["plain"], found["hooked"]
    output.emit("\n")
    verdict = "equal" if found["equal"] else "NOT EQUAL"
    _field(
        "losses",
        f"{verdict}: {plain['loss']:.5f} without, {hooked['loss']:.5f} with the hook (relative difference "
        f"of loss and gradient norm {found['difference']:.1e}, limit {found['tolerance']:.0e})",
    )
    _time(found["step_time"], more="--rounds 30")
    before, after = plain["peak_bytes"] / MEBIBYTE, hooked["peak_bytes"] / MEBIBYTE
    _field(
        "peak memory",
        f"{before:,.0f} MiB without, {after:,.0f} MiB with the hook: {after / before:.2f} of the "
        "memory (above the weights, gradients included)",
    )
    _field("kernels", "")
    for line in found["kernels"]:
        _say(line, " " * 15, " " * 17)


def _time(found: dict[str, Any], more: str) -> None:
    """Print two step times and their comparison; `more` is the option for more turns."""
    times = f"{_milliseconds(found['first'])} without, {_milliseconds(found['second'])} with the hook"
    _field("step time", f"{times}, medians of {found['pairs']} turns")
    _field("", ratio(found, more))


def ratio(found: dict[str, Any], more: str) -> str:
    """Return a sentence about a ratio of times.

    Args:
        found: what `turns.Comparison.to_dict` returns.
        more: the option that measures more turns.
    """
    value, low, high = (f"{found[name]:.2f}" for name in ("ratio", "low", "high"))
    interval = f"95% interval {low} to {high}"
    match found["verdict"]:
        case turns.FEW:
            return f"too few turns to tell a difference; measure more with {more}"
        case turns.NOISY:
            calm, loud = (_milliseconds(seconds) for seconds in found["quartiles"])
            return (
                "this machine is too noisy to tell a difference: the ratio may be anything from "
                f"{low} to {high}, and half of the steps without the hook took {calm} to {loud}. "
                f"Close other programs, or measure more turns with {more}"
            )
        case turns.SAME:
            return f"no difference beyond 5%: {value} of the time ({interval})"
        case verdict:
            return f"{verdict} with the hook: {value} of the time ({interval})"


def _imports(found: dict[str, Any]) -> None:
    unpatched, cold, warm = (found[name] * 1e3 for name in ("unpatched", "cold", "warm"))
    output.emit_heading("Imports: modeling_qwen3, reimported")
    output.emit("\n")
    _field("unpatched", f"{unpatched:.1f} ms")
    _field("first time", f"{cold - unpatched:+.1f} ms (reads, patches and stores the module)")
    _field("later", f"{warm - unpatched:+.1f} ms (from the cache)")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _field(name: str, text: str) -> None:
    head = f"  {name:<11}  "
    _say(text, head, " " * len(head)) if text else output.emit(f"{head.rstrip()}\n")


def _say(text: str, first: str = "  ", rest: str | None = None) -> None:
    """Print a paragraph wrapped to `WIDTH`; a longer word (a path) is not broken.

    Args:
        text: the paragraph.
        first: prefix of the first line.
        rest: prefix of the other lines; None: the same as `first`.
    """
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    output.emit("\n".join(lines) + "\n")
