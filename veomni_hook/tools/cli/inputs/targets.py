"""Find the module that the user means: families of the installed transformers, without importing it.

A family is a folder below `transformers/models` with at least one `modeling_*.py`. Completion reads only the
folder names, so that the shell never waits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from glob import glob
from importlib.machinery import PathFinder
from importlib.util import find_spec

from veomni_hook.layout import counted
from veomni_hook.tools.cli.output import note
from veomni_hook.tools.cli.usage import UsageError

MODELS = "transformers.models"


def transformers_folder() -> str:
    """Return the folder of the installed transformers package.

    Raises:
        UsageError: transformers is not installed.
    """
    spec = PathFinder.find_spec("transformers") or find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "transformers is not installed", where="this Python environment", fix="pip install transformers"
        )
    return next(iter(spec.submodule_search_locations))


def modeling_files(family: str, models: str | None = None) -> tuple[str, ...]:
    """Return the names of a family's modeling files, without `.py`; empty if there is no such family."""
    folder = os.path.join(models or os.path.join(transformers_folder(), "models"), family)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(name[:-3] for name in names if name.startswith("modeling_") and name.endswith(".py")))


def families(prefix: str = "", models: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return each family whose name has the prefix, with its modeling files.

    Args:
        prefix: the beginning of the names.
        models: the folder of the families; by default the installed transformers'.
    """
    models = models or os.path.join(transformers_folder(), "models")
    named = sorted(name for name in os.listdir(models) if name.startswith(prefix))
    files_of = {name: modeling_files(name, models) for name in named}
    return {name: files for name, files in files_of.items() if files}


def family_of(module: str) -> str:
    """Return the short name that `module_name` accepts for a module, or the module's name itself."""
    if not module.startswith(MODELS + "."):
        return module
    family, _, leaf = module.removeprefix(MODELS + ".").rpartition(".")
    stem = leaf.removeprefix("modeling_")
    if stem == leaf:
        return module
    return family if stem == family else stem


def family_folder(module: str) -> str:
    """Return the family of a modeling module, or the module's name if it belongs to no family."""
    if not module.startswith(f"{MODELS}."):
        return module
    return module.removeprefix(f"{MODELS}.").partition(".")[0]


def family_meant(text: str, known: Collection[str]) -> str:
    """Return the family of a saved model, of a hub id, or of a class; what is none of them as it is.

    A folder, and a hub id that the hub's cache holds, say it in their config. Of any other id, and of a
    class, it is the longest of the ``known`` families that the name begins with: qwen3 of `Qwen/Qwen3-0.6B`,
    qwen3_moe of `Qwen3MoeForCausalLM`.

    Raises:
        UsageError: the config does not say it.
    """
    if text in known:  # also where a folder beside the user has the name
        return text
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    cached = os.path.join(hub, "models--" + text.replace("/", "--"), "snapshots", "*")
    configs = [
        path for folder in (text, *sorted(glob(cached))) if os.path.isfile(path := f"{folder}/config.json")
    ]
    if not configs and "/" not in text and not text[:1].isupper():
        return text
    name = text.rpartition("/")[2]
    if configs:
        try:
            with open(configs[-1], encoding="utf-8") as file:
                name = str(json.load(file)["model_type"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{configs[-1]} does not say a model_type", where=text, fix="name the model's family"
            ) from error
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    meant = max(
        (family for family in known if plain.startswith(family.replace("_", ""))), key=len, default=text
    )
    if not configs and "/" in text and meant != text:
        note(f"{text} is not in the hub's cache. By its name it is of the family {meant}.")
    return meant


def module_name(text: str) -> str:
    """Return the module that the user means.

    Args:
        text: a dotted module name, a family (`qwen3`), what follows `modeling_` in a file's name
            (`blip_text`, `donut_swin`), or what `family_meant` understands.

    Raises:
        UsageError: there is no such family; the message has the nearest names.
    """
    known = families()
    text = family_meant(text, known)
    if "." in text:
        return text
    files = known.get(text, ())
    if f"modeling_{text}" in files:
        return f"{MODELS}.{text}.modeling_{text}"
    homes = [family for family, names in known.items() if f"modeling_{text}" in names]
    if len(homes) == 1:
        return f"{MODELS}.{homes[0]}.modeling_{text}"
    if len(files) == 1:
        return f"{MODELS}.{text}.{files[0]}"
    if files:
        raise UsageError(
            f"the family {text!r} has {counted(len(files), 'modeling file')}",
            where=os.path.join(transformers_folder(), "models", text),
            fix="name one: " + ", ".join(name.removeprefix("modeling_") for name in files),
        )
    raise unknown_family(text, known, transformers_folder())


def unknown_family(name: str, known: Mapping[str, Sequence[str]], folder: str) -> UsageError:
    """Return the error for what is no family in a folder; ``known`` are its families with their files."""
    stems = {file.removeprefix("modeling_") for names in known.values() for file in names}
    return UsageError(
        f"unknown family {name!r}",
        where=f"{folder} ({counted(len(known), 'family', 'families')})",
        fix=suggestion(name, {*known, *stems}),
    )


def complete_family(incomplete: str) -> list[str]:
    """Complete a family or a module name for the shell; empty if transformers is not installed."""
    try:
        if not incomplete.startswith(MODELS + "."):
            return list(families(incomplete))
        family, dot, _ = incomplete.removeprefix(MODELS + ".").partition(".")
        files_of = {family: modeling_files(family)} if dot else families(family)
        names = [f"{MODELS}.{name}.{file}" for name, files in files_of.items() for file in files]
        return [name for name in names if name.startswith(incomplete)]
    except (UsageError, OSError):
        return []


def suggestion(name: str, known: Collection[str]) -> str:
    """Return what to do about a family that does not exist."""
    from veomni_hook.patches.code.nearest_names import nearest

    near = nearest(name.lower().replace("-", "_"), known, apart=0.45)
    start = f"nearest names: {', '.join(near)}; " if near else ""
    return f"{start}`veomni-hook list --all` shows every family"
