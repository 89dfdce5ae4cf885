"""VeOmni's configs on the installed release, whichever it is: what applies of them, beside plain models.

Arguments: `plain`, a file, and folders: writes the numbers of models without the hook and without VeOmni. Or the
release that the configs are made for, that file, a device, and folders: prints what differs as one line of JSON.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import veomni_hook
from tests.veomni.configurations import AUDIO, CLASSES, CONFIGURATIONS, IMAGE, LABELS, VIDEO
from tests.veomni.inputs import HEARS, SEES, inputs
from tests.veomni.sides import bound, config_module, differences, prepare, side, weighted
from tests.veomni.standins import stand_ins
from tests.veomni.unable import UNABLE
from veomni_hook.finders import configs
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.spec import PatchConfig, PatchType
from veomni_hook.tools.cli.inputs.sources import SourceTree, read_source, source_tree
from veomni_hook.tools.migration.alone import without
from veomni_hook.tools.migration.judge import RENAMED, judge
from veomni_hook.tools.migration.needs import needs
from veomni_hook.tools.migration.reduce import own

T = TypeVar("T")
#: The class that upstream can call where VeOmni trains the one around it.
THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
WHOLE = {CLASSES[folder][0] for folder in THINKERS}
GENERATE = "generate:"
#: How many tokens `generate` adds.
NEW = 6
_NO_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")

#: What a call gave by name, or the error's text.
Numbers = Mapping[str, Tensor | None] | str


def main() -> None:
    torch.set_num_threads(1)
    first, file, *rest = sys.argv[1:]
    if first == "plain":
        torch.save({folder: dict(plain(folder)) for folder in rest}, file)
        print(json.dumps(rest))
        return
    base, expected = source_tree(first, where="the release"), torch.load(file)
    device, *folders = rest
    missing: list[str] = []
    loaded = with_missing(lambda: configs.load(config_module(f, device) for f in folders), missing)
    with_missing(prepare, missing)
    veomni_hook.activate()
    found = {}
    for folder, one in zip(folders, loaded, strict=True):
        (config,) = one.configs
        found[f"{CONFIGURATIONS[folder][0]}_{device}"] = compared(
            folder, device, config, base, expected[folder]
        )
    print(json.dumps({"missing": missing, "found": found}))


def plain(folder: str) -> Iterator[tuple[str, tuple[Mapping[str, Tensor], dict[str, Numbers]]]]:
    """Yield by class the weights and the numbers of upstream's models."""
    for trained in (THINKERS.get(folder, CLASSES[folder][0]), *CLASSES[folder][1:]):
        made = model(side(folder), folder, trained)
        weights = {name: value.clone() for name, value in made.state_dict().items()}
        yield trained, (weights, dict(calls(made, made, folder)))


def compared(
    folder: str, device: str, config: PatchConfig, base: SourceTree, expected: Mapping[str, Any]
) -> dict[str, Any]:
    """One config: its patches that apply, those of them that ran, and what differs by call."""
    name = config.source_module
    held, renamed = applicable(config, base)
    differing: dict[str, dict[str, Any]] = {}
    added: dict[str, str] = {}
    ran: set[CodeType] = set()
    unable = UNABLE.get((folder, device))
    with stand_ins(unable.package if unable else ""):
        forget(name)
        veomni_hook.register(held)
        module = import_module(name)
        for trained, (state, numbers) in expected.items():
            for kind in dict.fromkeys((trained, trained.replace("Thinker", ""))):
                with loss_in_force(module, kind, held) as loss, noted(ran):
                    try:
                        made, inner = pair(module, folder, kind, state)
                        given = dict(calls(made, inner, folder, tokens_labelled=loss))
                        added |= called(made, module, held)
                    except Exception as error:
                        given = dict.fromkeys(numbers, _told(error))
                for call, plainly in numbers.items():
                    differing[f"{kind}/{call}"] = differences(plainly, given[call])
    outcome = veomni_hook.activate(enabled=False).status().modules[name].to_dict()
    theirs = [one for one in outcome["report"].get("applied", ()) if one["config"] == held.name]
    targets = {patch.target for patch in held.patches}
    applied = targets & {one["target"] for one in theirs}
    return {
        "patches": len(config.patches),
        "applied": sorted(applied),
        "lost": sorted(targets - applied),
        "renamed": renamed,
        "ran": sorted(target for target in applied if _has_run(module, target, ran)),
        "calls": differing,
        "added": added,
    }


def applicable(config: PatchConfig, base: SourceTree) -> tuple[PatchConfig, list[str]]:
    """The config with those patches that apply to the installed release, and the targets with renamed names."""
    name, tree = config.source_module, source_tree()
    source, origin = read_source(tree.path(name)), Origin(name, tree.path(name), "transformers", tree.version)
    document = Document(source, name)
    judged = judge(config, source, origin, base=read_source(base.path(name)), base_version=base.version)
    fine = [one for one in judged if one.fits]
    held = without(config, document, name)
    held.patches = [own(one.patch, document) for one in fine if one.patch is not None]
    needed = needs(config, held.patches, document)
    held.additional_imports, held.post_import_blocks = needed.imports, needed.blocks
    held.helpers, held.positioned_helpers = needed.helpers, needed.placed
    held.drop_imported_names, held.exclude = set(needed.drops), []
    return held, [one.target for one in fine if one.verdict == RENAMED]


def with_missing(work: Callable[[], T], missing: list[str]) -> T:
    """Do what imports VeOmni; a name that it imports and transformers no longer has becomes an empty class."""
    while True:
        try:
            return work()
        except Exception as error:
            said = _NO_NAME.search(str(error))
            if said is None or not said[2].startswith("transformers."):
                raise
            setattr(import_module(said[2]), said[1], type(said[1], (), {}))
            missing.append(f"{said[2]}.{said[1]}")


def forget(name: str) -> None:
    """Let the next import of a module execute it again."""
    module = sys.modules.pop(name, None)
    package = import_module(name.rpartition(".")[0])
    for held, value in list(vars(package).items()):
        if module is not None and (value is module or getattr(value, "__module__", "") == name):
            delattr(package, held)


@contextmanager
def noted(ran: set[CodeType]) -> Iterator[None]:
    """Note the code that runs in the block."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _has_run(module: ModuleType, target: str, ran: set[CodeType]) -> bool:
    """Whether a function, a method or any method of a class of a module has run."""
    held: Any = module
    for part in target.split("."):
        held = getattr(held, part)
    functions = vars(held).values() if isinstance(held, type) else [held]
    return any(getattr(inspect.unwrap(one), "__code__", None) in ran for one in functions if callable(one))


@contextmanager
def loss_in_force(module: ModuleType, kind: str, config: PatchConfig) -> Iterator[bool]:
    """Bind VeOmni's slots, and its loss, which returns three values, for a class that a patch made for that.

    Yields:
        Whether VeOmni's loss is in force.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    upstream = dict(LOSS_MAPPING)
    bound(module)
    made_for = {
        patch.target.partition(".")[0]
        for patch in config.patches
        if "loss_function" in getattr(getattr(patch.replacement, "__code__", None), "co_names", ())
    }
    theirs = any(one.__name__ in made_for for one in getattr(module, kind).__mro__)
    if not theirs:
        LOSS_MAPPING.update(upstream)
    try:
        yield theirs
    finally:
        LOSS_MAPPING.update(upstream)


def called(made: nn.Module, module: ModuleType, config: PatchConfig) -> Iterator[tuple[str, str]]:
    """Call the methods that the config adds for VeOmni's trainer and that need no arguments; yield the errors."""
    for patch in config.patches:
        owner, _, method = patch.target.rpartition(".")
        if patch.patch_type is not PatchType.METHOD_ADDITION:
            continue
        for part in made.modules():
            if isinstance(part, getattr(module, owner)):
                function = getattr(part, method)
                if any(p.default is p.empty for p in inspect.signature(function).parameters.values()):
                    break
                try:
                    function()
                    yield patch.target, ""
                except Exception as error:
                    yield patch.target, _told(error)
                break


def model(module: Any, folder: str, trained: str, state: Mapping[str, Tensor] | None = None) -> Any:
    """A model of upstream's configuration, with seeded weights or the state of another."""
    family, name, values = CONFIGURATIONS[folder]
    config = getattr(import_module(f"transformers.models.{family}.configuration_{family}"), name)(**values)
    kind = getattr(module, trained)
    if not isinstance(config, kind.config_class):
        parts = (getattr(config, part) for part in config.sub_configs)
        config = next(part for part in parts if isinstance(part, kind.config_class))
    if trained.endswith("ForSequenceClassification"):
        config.num_labels = LABELS
    torch.manual_seed(0)
    return weighted(kind._from_config(config, attn_implementation="eager"), state)


def pair(module: Any, folder: str, kind: str, state: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """A model, and the part of it that upstream's numbers are of: all of it, or its thinker."""
    if kind not in WHOLE:
        made = model(module, folder, kind, state)
        return made, made
    family, name, values = CONFIGURATIONS[folder]
    config = getattr(import_module(f"transformers.models.{family}.configuration_{family}"), name)(**values)
    made = getattr(module, kind)._from_config(config, attn_implementation="eager")
    return made, weighted(made.thinker, state)


def calls(
    made: Any, inner: Any, folder: str, *, tokens_labelled: bool = False
) -> Iterator[tuple[str, Numbers]]:
    """Yield what a model gives for every batch, with the gradients of its part, and what the part generates.

    Args:
        tokens_labelled: a classifier takes a label for each token, and gives logits for each.
    """
    given = dict(batches(folder, type(made).__name__))
    tokens_labelled &= type(made).__name__.endswith("ForSequenceClassification")
    for name, batch in given.items():
        torch.manual_seed(2)
        yield name, _attempt(lambda batch=batch: _step(made, inner, batch, tokens_labelled=tokens_labelled))
    if inner.can_generate():
        for name, batch in given.items():
            yield f"{GENERATE} {name}", _attempt(lambda batch=batch: _generated(inner, batch))


def batches(folder: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Text of two rows, one of them padded, and a row with pictures and sound, as upstream's processors make it."""
    given = inputs(folder, CLASSES[folder][0])
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, IMAGE, (2, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if kind.endswith("ForSequenceClassification"):
        labels = torch.tensor([0, LABELS - 1])
    yield "text", {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if folder in SEES and not kind.endswith("ForCausalLM"):
        media = given["media"]
        named = ("input_ids", "attention_mask", "labels", "pixel_values", "pixel_values_videos")
        batch = {name: media[name] for name in (*named, "image_grid_thw", "video_grid_thw")}
        if folder in HEARS:
            batch["input_features"] = media["input_features"].T[None].contiguous()
            batch["feature_attention_mask"] = torch.ones(batch["input_features"].shape[::2], dtype=torch.long)
            batch["video_second_per_grid"] = torch.tensor([1.0])
        else:
            types = ((1, IMAGE), (2, VIDEO), (3, AUDIO))
            batch["mm_token_type_ids"] = sum(
                number * (batch["input_ids"] == token) for number, token in types
            )
        yield "media", batch


def _step(made: Any, inner: nn.Module, batch: Mapping[str, Any], *, tokens_labelled: bool) -> Numbers:
    made.train()
    made.zero_grad(set_to_none=True)
    arguments = _copied(batch)
    if tokens_labelled:  # upstream's label is that of the last token
        arguments["labels"] = torch.full_like(batch["input_ids"], -100)
        arguments["labels"][:, -1] = batch["labels"]
    given = made(**arguments, use_cache=False)
    given.loss.backward()
    numbers = {name: value.detach() for name, value in given.items() if isinstance(value, Tensor)}
    if tokens_labelled:
        numbers["logits"] = numbers["logits"].view(*batch["input_ids"].shape, -1)[:, -1]
    return numbers | {f"grad of {name}": parameter.grad for name, parameter in inner.named_parameters()}


def _generated(made: Any, batch: Mapping[str, Any]) -> Numbers:
    """Greedy tokens and their logits; after text, also of a second turn on the filled cache."""
    made.eval()
    prompt = {name: value for name, value in _copied(batch).items() if name != "labels"}
    how = {"do_sample": False, "use_cache": True, "max_new_tokens": NEW, "min_new_tokens": NEW}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    if hasattr(made.config.get_text_config(), "output_router_logits"):
        how["output_router_logits"] = False  # upstream's balancing loss refuses the longer mask of a cache
    first = made.generate(**prompt, **how)
    numbers = {"tokens": first.sequences, "logits": torch.stack(first.logits)}
    if "pixel_values" in batch:
        return numbers
    row = torch.cat([first.sequences, batch["input_ids"][:, :3].flip(1)], dim=1)
    seen = functional.pad(
        batch["attention_mask"], (0, row.shape[1] - batch["attention_mask"].shape[1]), value=1
    )
    second = made.generate(row, attention_mask=seen, past_key_values=first.past_key_values, **how)
    return numbers | {"second tokens": second.sequences, "second logits": torch.stack(second.logits)}


def _copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in batch.items()}


def _attempt(work: Callable[[], Numbers]) -> Numbers:
    try:
        return work()
    except Exception as error:  # compared with the other side's
        return _told(error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
