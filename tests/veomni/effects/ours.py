"""What the hook gives beside what VeOmni gave: `python -m tests.veomni.effects.ours WHAT THEIRS PLAIN FOLDER...`.

``WHAT`` is ``plain``, which writes the numbers of upstream's models to the file ``PLAIN`` (without the hook), a probe,
or ``ours`` for all. Prints, by folder, probe and what it looked at, an empty text for the same effect, or what is
missing. ``THEIRS`` is what `theirs` wrote; VeOmni is not needed.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import veomni_hook.install  # isort: skip - in front of transformers, as in a script
import torch
from torch import Tensor, nn
from torch.nn import functional

import veomni_hook
from tests.veomni import newer, sides
from tests.veomni.configurations import CLASSES
from tests.veomni.effects.batches import CLASSIFIES, classes, upstreams
from veomni_hook.routing import monitor, record, replay
from veomni_hook.tools.migration import vocabulary as words

Theirs = Mapping[str, Any]
#: What a probe found by what it looked at: an empty text, or what is missing.
Results = dict[str, str]


#: How far numbers may be apart, relative to the largest of a tensor; of tiny gradients, absolute.
CLOSE = 1e-3


class Side:
    """The models of one folder, hooked, with the weights of VeOmni's."""

    def __init__(self, folder: str, theirs: Theirs, plain: Mapping[str, Any]) -> None:
        self.folder, self.theirs, self.plain = folder, theirs, plain
        self.module = sides.side(folder)
        self.kinds = classes(folder)
        self.model, self.expected, self.steps = map(cache, (self._model, self._expected, self._steps))
        #: Without classifiers, which take no packed rows.
        self.trained = [kind for kind in self.kinds if not kind.endswith(CLASSIFIES)]

    def _model(self, kind: str) -> Any:
        model = newer.model(self.module, self.folder, kind)
        names = renamed(self.theirs["classes"][kind]["weights"], model.state_dict())
        weights = self.theirs["classes"][kind]["weights"]
        lost = model.load_state_dict({names.get(name, name): w for name, w in weights.items()}, strict=False)
        assert not lost.missing_keys, lost.missing_keys
        return model

    def _expected(self, kind: str) -> dict[str, Any]:
        """What VeOmni's step gave by batch, with the names of this release."""
        record = self.theirs["classes"][kind]
        new = renamed(record["weights"], self.model(kind).state_dict())
        new = {f"grad of {name}": f"grad of {other}" for name, other in new.items()}
        return {
            batch: numbers if isinstance(numbers, str) else {new.get(n, n): v for n, v in numbers.items()}
            for batch, numbers in record["numbers"].items()
        }

    def _steps(self, kind: str) -> dict[str, Any]:
        """The numbers of a step by batch, or an error's text."""
        model = self.model(kind)
        given = upstreams(self.folder, kind)
        return {
            name: step(model, given[name]) for name in given if not (name == "packed" and "media" in given)
        }

    def unequal(self, kind: str, batch: str, numbers: newer.Numbers) -> str:
        """What is neither VeOmni's nor upstream's."""
        expected = self.expected(kind).get(batch, "no such batch")
        upstreams_own = self.plain[kind][batch]
        far = unequal(expected, numbers)
        return far and (far if isinstance(upstreams_own, str) else unequal(upstreams_own, numbers))


def renamed(old: Iterable[str], new: Iterable[str]) -> dict[str, str]:
    """New names of weights that a release keeps one level deeper, as ``a.c`` and ``a.b.c``."""
    lost, fresh, names = set(old) - set(new), set(new) - set(old), {}
    while True:
        for name in sorted(lost):
            parts = name.split(".")
            fits = [one for one in fresh if [part for part in one.split(".") if part in parts] == parts]
            if len(fits) == 1:
                names[name] = fits[0]
        if not lost & names.keys():
            return names
        lost -= names.keys()
        fresh -= set(names.values())


def step(model: Any, batch: Mapping[str, Any], **more: Any) -> newer.Numbers:
    """Loss, outputs and gradients, or an error's text."""

    def compute() -> newer.Numbers:
        model.train().zero_grad(set_to_none=True)
        output = model(**{**batch, **more}, use_cache=False)
        payload = output.get("fused_linear_aux")
        (output.loss if payload is None else payload.log_probs.sum()).backward()
        values = {**output, **({} if payload is None else vars(payload))}
        numbers = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return numbers | {f"grad of {name}": value for name, value in gradients}

    return newer._attempt(compute)


def numbers(side: Side) -> Results:
    """Losses, outputs and gradients are VeOmni's, or upstream's where these two differ."""
    return {
        f"{kind}/{name}": side.unequal(kind, name, given)
        for kind in side.kinds
        for name, given in side.steps(kind).items()
    }


def unequal(expected: Any, numbers: Any) -> str:
    """What is not close; outputs that one side alone has do not count, gradients do."""
    if isinstance(expected, str) or isinstance(numbers, str):
        return f"VeOmni: {expected}" if isinstance(expected, str) else numbers
    # A release may have dropped weights of no effect.
    shared = [name for name in expected if name in numbers and name not in ("logits", "rope_deltas")]
    if not any(name.startswith("grad of ") for name in shared):
        return "no gradients"
    return "; ".join(filter(None, (_apart(name, expected[name], numbers.get(name)) for name in shared)))[:300]


def _apart(name: str, expected: Tensor | None, number: Tensor | None) -> str:
    if expected is None or number is None:
        return "" if expected is number else f"{name}: missing on one side"
    difference, scale = (number - expected).abs().max().item(), expected.abs().max().item()
    return "" if difference <= CLOSE * max(scale, CLOSE) else f"{name}: {difference:.1e} of {scale:.1e}"


def slots(side: Side) -> Results:
    """The ops that ran, by the code that asked."""
    found: Results = {}
    for kind in side.kinds:
        side.steps(kind)
        for row in veomni_hook.explain(side.model(kind)).rows:
            ran = row.called and row.backend == "torch"
            for place in row.asked_in or (row.kind,):
                found.setdefault(f"{place} {row.op}/{row.variant}", row.reason)
                if ran:
                    found[f"{place} {row.op}/{row.variant}"] = ""
    return found


def of_logits(model: Any, batch: Mapping[str, Any]) -> newer.Numbers:
    """Upstream's log-probabilities of the labels, and the entropies, by its logits."""

    def compute() -> newer.Numbers:
        model.train().zero_grad(set_to_none=True)
        rest = {name: value for name, value in batch.items() if name != "labels"}
        labels = functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
        logits = model(**rest, use_cache=False).logits.float().log_softmax(-1)
        told = labels != -100
        found = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * told
        found.sum().backward()
        numbers = {"log_probs": found.detach(), "entropy": (-(logits.exp() * logits).sum(-1) * told).detach()}
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return numbers | {f"grad of {name}": value for name, value in gradients}

    return newer._attempt(compute)


def log_probs(side: Side) -> Results:
    found = {}
    for kind in side.trained:
        model, batch = side.model(kind), asked(side.folder, kind)
        given = step(model, batch, return_log_probs=True, output_router_logits=False)
        found[kind] = side.unequal(kind, "log-probs", given)
    return found


def asked(folder: str, kind: str) -> dict[str, Any]:
    """The batch whose log-probabilities are compared."""
    batches = upstreams(folder, kind)
    return batches.get("media", batches["packed"])


def positions(side: Side) -> Results:
    """A pickled function computes VeOmni's positions."""
    expected = side.theirs["positions"]
    if expected is None:
        return {}
    (kind, *_) = side.kinds
    model, media = side.model(kind), upstreams(side.folder, kind)["media"]

    def compute() -> str:
        from veomni_hook.multimodal import position_ids

        function = pickle.loads(pickle.dumps(position_ids(model.config)))
        places = function(media)
        if places.shape != expected.shape or not torch.equal(places.to(expected.dtype), expected):
            return f"other positions: {places.tolist()} {expected.tolist()}"
        numbers = step(model, {**media, "position_ids": places})
        return side.unequal(kind, "media", numbers)

    return {kind: _told(compute)}


def packed(side: Side) -> Results:
    """A packed row gives the sums of its samples."""
    return {kind: _told(lambda kind=kind: _packed(side, kind)) for kind in side.trained}


def _packed(side: Side, kind: str) -> str:
    model, batch = side.model(kind), upstreams(side.folder, kind)["packed"]
    edges = batch["cu_seq_lens_q"].tolist()
    plain = {n: batch[n] for n in ("input_ids", "labels", "position_ids")}
    # It is a mean over the tokens of a batch.
    without = {"output_router_logits": False}
    numbers = step(model, {**plain, **_options(batch), **without})
    sums: dict[str, Any] = {}
    for first, last in pairwise(edges):
        sample = {name: value[..., first:last] for name, value in plain.items()}
        count = int((sample["labels"][:, 1:] != -100).sum())
        one = step(model, {**sample, **without})
        if isinstance(one, str):
            return one
        for name, value in one.items():
            if value is not None and (name == "loss" or name.startswith("grad of ")):
                sums[name] = sums.get(name, 0) + value * count
    if isinstance(numbers, str):
        return numbers
    count = int((plain["labels"][:, 1:] != -100).sum())
    return unequal({name: value / count for name, value in sums.items()}, numbers)


def _options(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in batch.items() if n.startswith(("cu_seq_lens", "max_length"))}


def routes(side: Side) -> Results:
    """Recorded experts are chosen again, with the bits of the loss and all gradients, and their load is counted."""
    found = {}
    for kind in side.trained:
        model, batch = side.model(kind), upstreams(side.folder, kind)["packed"]

        def compute(model: Any = model, batch: Any = batch) -> str:
            with record(model) as chosen, monitor(model) as load:
                first = step(model, batch)
            with replay(model, pickle.loads(pickle.dumps(chosen))):
                again = step(model, batch)
            if isinstance(first, str):
                return first
            counted = len(load) if hasattr(load, "__len__") else 1
            return "; ".join(sides.differences(first, again)) or (
                "" if counted and chosen.calls else "no route"
            )

        found[kind] = _told(compute)
    return found


def speech(side: Side) -> Results:
    """The parameters of the whole model are those of VeOmni's."""
    whole = CLASSES[side.folder][0]
    if whole not in newer.WHOLE:
        return {}

    def compute() -> str:
        from importlib import import_module

        from tests.veomni.configurations import CONFIGURATIONS

        family, name, values = CONFIGURATIONS[side.folder]
        config = getattr(import_module(f"transformers.models.{family}.configuration_{family}"), name)(
            **values
        )
        model = getattr(side.module, whole)._from_config(config, attn_implementation="eager")
        names, expected = {n for n, _ in model.named_parameters()}, side.theirs["parameters"]
        new = renamed(expected, names)
        return ", ".join(sorted(names ^ {new.get(name, name) for name in expected})[:3])

    return {whole: _told(compute)}


def numerics(side: Side) -> Results:
    """In bfloat16 under autocast, a module has the bits of VeOmni's, by class."""
    model = newer.model(side.module, side.folder, side.kinds[0]).bfloat16()
    names = renamed(side.theirs["classes"][side.kinds[0]]["weights"], model.state_dict())
    weights = side.theirs["classes"][side.kinds[0]]["weights"]
    model.load_state_dict(
        {names.get(n, n): w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()},
        strict=False,
    )
    modules, found = dict(model.named_modules()), {}
    new = renamed([name for name, *_ in side.theirs["modules"].values()], modules)
    for kind, (name, args, kwargs, expected) in side.theirs["modules"].items():
        one = modules.get(new.get(name, name))
        found[kind] = (
            "no such module"
            if one is None
            else _told(lambda o=one, a=args, k=kwargs, e=expected: _bits(o, a, k, e))
        )
    return found


def _bits(module: nn.Module, args: Any, kwargs: Any, expected: Any) -> str:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = module(*args, **kwargs)
    pairs = list(zip(_tensors(expected), _tensors(output), strict=False))
    far = max(
        (float((a.float() - b.float()).abs().max()) for a, b in pairs if a.shape == b.shape), default=-1.0
    )
    dtypes = {f"{b.dtype}, not {a.dtype}" for a, b in pairs if a.dtype != b.dtype}
    return "; ".join(sorted(dtypes)) or ("" if far == 0 else f"other bits: off by {far:.1e}")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, tuple | list) else []


def _told(compute: Callable[[], str]) -> str:
    try:
        return compute()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


PROBES: Mapping[str, Callable[[Side], Results]] = {
    "numbers": numbers, "slots": slots, words.LOG_PROBS: log_probs, words.POSITION_IDS: positions,
    words.PACKING: packed, words.ROUTER_REPLAY: routes, words.EXCLUSION: speech, words.NUMERICS: numerics,
}  # fmt: skip


def upstreams_own(side: Side) -> dict[str, Any]:
    """The numbers of upstream's models by class and batch."""
    found = {kind: {**side.steps(kind)} for kind in side.kinds}
    for kind in side.trained:
        found[kind]["log-probs"] = of_logits(side.model(kind), asked(side.folder, kind))
    return found


def main() -> None:
    torch.set_num_threads(1)
    what, file, plain, *folders = sys.argv[1:]
    theirs = torch.load(file)
    if what == "plain":
        torch.save({folder: upstreams_own(Side(folder, theirs[folder], {})) for folder in folders}, plain)
        return
    upstream = torch.load(plain)
    probes = {what: PROBES[what]} if what in PROBES else PROBES
    results = {}
    for folder in folders:
        side = Side(folder, theirs[folder], upstream[folder])
        results[folder] = {name: probe(side) for name, probe in probes.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
