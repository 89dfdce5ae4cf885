"""Configs whose modules import modules, read files and variables at random: what runs is what a fresh build makes.

A world is a folder with such a graph, and two configs that patch a module each with what their modules say. Then
things change at random: texts, files, variables, modules that were not there, what the script imports or sets
before. After each change a start with the cache must execute the same text as one without any.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stress import stand
from tests.stress.result import Line, Part

TARGETS = ("transformers.models.tiny.modeling_tiny", "transformers.models.still.modeling_still")
_CONFIG = """from veomni_hook import PatchConfig
import {root}
config = PatchConfig("{target}")
config.add_post_import_block(f"SAID = {{{root}.value!r}}")
"""
_HEAD = "import os, pathlib, sys\nvalue = []\n"
#: What a module may do. {other} is a module below it, {absent} one that may not be there.
_IMPORTS = (
    "import {other}\nvalue.append({other}.value)",
    "from {other} import value as other\nvalue.append(other)",
    "import {other} as other\nvalue.append(other.value)",
    "import importlib\nvalue.append(importlib.import_module({other!r}).value)",
    "from importlib import import_module as get\nvalue.append(get({other!r}).value)",
    "def late():\n    from {other} import value\n    return value\nvalue.append(late())",
    "value.append(__import__({other!r}, fromlist=['value']).value)",
    "import pkgutil\nvalue.append(pkgutil.resolve_name({other!r} + ':value'))",
    "if os.environ.get('V0', '1') != '2':\n    import {other} as other\n    value.append(other.value)",
    "try:\n    import {absent} as other\n    value.append(other.value)\nexcept ImportError:\n    value.append(0)",
    "try:\n    from pack import {leaf} as other\n    value.append(other.value)\nexcept ImportError:\n    value.append(0)",
)
_READS = (
    "value.append({number})",
    "try:\n    value.append(open({file!r}).read())\nexcept OSError:\n    value.append(0)",
    "path = pathlib.Path({file!r})\nvalue.append(path.read_text() if path.is_file() else path.is_dir())",
    "try:\n    value.append(os.read(os.open({file!r}, os.O_RDONLY), 9).decode())\nexcept OSError:\n    value.append(0)",
    "try:\n    value.append(open({name!r}).read())\nexcept OSError:\n    value.append(0)",
    "value.append(os.path.exists({file!r}))",
    "value.append(os.path.getsize({file!r}) if os.path.isfile({file!r}) else 0)",
    "value.append(sorted(os.listdir({folder!r})))",
    "value.append(sorted(entry.name for entry in os.scandir({folder!r})))",
    "import glob\nvalue.append(sorted(glob.glob({folder!r} + '/*.txt')))",
    "value.append(os.path.basename(os.getcwd()))",
    "value.append(os.environ.get({variable!r}))",
    "value.append(os.getenv({variable!r}, 'no'))",
    "value.append({variable!r} in os.environ)",
    "try:\n    value.append(os.environ[{variable!r}])\nexcept KeyError:\n    value.append(0)",
    "value.append(os.path.expandvars('$' + {variable!r}))",
)
_UNRECORDED = (
    "value.append(sorted(name for name in os.environ if name.startswith('V')))",
    "value.append(os.environ.copy().get({variable!r}))",
    "value.append(os.popen('printf \"$' + {variable!r} + '\"').read())",
    "value.append(os.environ.setdefault({variable!r}, 'set'))",
)
_MODULES = ("alone", "pack.one", "pack.two", "space.deep", "space.below.deeper", "last")
_ABSENT = ("absent", "pack.extra", "space.extra")
_VARIABLES = ("V0", "V1", "V2")
_FILES = ("a.txt", "b.txt")


class _World:
    """A folder with modules, data and configs, and how scripts start in it."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.recorded = True
        self.variables: dict[str, str | None] = {}
        self.where = "data"
        self.before: list[str] = []
        self.write("pack/__init__.py", "value = 0\n")
        (folder / "data" / "deep").mkdir(parents=True)
        for index in range(len(_MODULES)):
            self.module(index)
        for number, target in enumerate(TARGETS):
            root = _MODULES[draw.randrange(2) if number else 0]
            self.write(f"config{number}.py", _CONFIG.format(root=root, target=target))

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def module(self, index: int) -> None:
        """Write a module anew."""
        draw, below = self.draw, _MODULES[index + 1 :]
        lines = []
        for _ in range(draw.randint(1, 4)):
            kinds = [_READS, _READS, _IMPORTS, _IMPORTS] if below else [_READS]
            text = draw.choice(draw.choice(kinds))
            if draw.random() < 0.01:
                text, self.recorded = draw.choice(_UNRECORDED), False
            absent = draw.choice(_ABSENT)
            lines.append(
                text.format(
                    other=draw.choice(below or _MODULES[-1:]),
                    absent=absent,
                    leaf=absent.rpartition(".")[2],
                    number=draw.randrange(100),
                    name=draw.choice(_FILES),
                    file=str(self.folder / draw.choice(("data", "data/deep")) / draw.choice(_FILES)),
                    folder=str(self.folder / draw.choice(("data", "data/deep"))),
                    variable=draw.choice(_VARIABLES),
                )
            )
        self.write(_MODULES[index].replace(".", "/") + ".py", _HEAD + "\n".join(lines) + "\n")

    def change(self) -> str:
        """Change something; return what."""
        name = self.draw.choice([*_CHANGES])
        _CHANGES[name](self)
        return name

    def start(self, cache: str, targets: list[str]) -> dict[str, Any]:
        """The texts that run, and whether configs were loaded; in a forked child."""

        def work() -> dict[str, Any]:
            import veomni_hook

            for name, value in self.variables.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            os.chdir(self.folder / self.where)
            sys.path[:0] = [str(self.folder / "first"), str(self.folder)]
            importlib.invalidate_caches()
            for line in self.before:
                exec(line, {})
            before = {*sys.modules}
            handle = veomni_hook.activate(cache_dir=cache, patches=["config0", "config1"])
            modules = [importlib.import_module(target) for target in targets]
            loaded = bool({"config0", "config1"} & ({*sys.modules} - before))
            outcomes = handle.status().modules
            return {
                "texts": [module.__spec__.loader.get_source(module.__name__) for module in modules],  # type: ignore[union-attr]
                "loaded": loaded,
                "reasons": [outcomes[target].reason for target in targets],
            }

        found: dict[str, Any] = stand.wait(*stand.fork(work))
        return found


def _in_module(world: _World) -> None:
    world.module(world.draw.randrange(len(_MODULES)))


def _in_file(world: _World) -> None:
    path = world.folder / world.draw.choice(("data", "data/deep")) / world.draw.choice(_FILES)
    if path.exists() and world.draw.random() < 0.3:
        path.unlink()
    else:
        path.write_text(str(world.draw.randrange(100)))


def _in_variable(world: _World) -> None:
    world.variables[world.draw.choice(_VARIABLES)] = world.draw.choice((None, "1", "2", "longer"))


def _in_absent(world: _World) -> None:
    path = world.folder / (world.draw.choice(_ABSENT).replace(".", "/") + ".py")
    if path.exists():
        path.unlink()
    else:
        path.write_text(f"value = {world.draw.randrange(100)}\n")


def _in_path(world: _World) -> None:
    path = world.folder / "first" / world.draw.choice(("alone.py", "last.py"))
    if path.exists():
        path.unlink()
    else:
        world.write(f"first/{path.name}", f"value = [{world.draw.randrange(100)}]\n")


def _in_script(world: _World) -> None:
    module = world.draw.choice(_MODULES)
    choices = (
        [], [], [f"import {module}"], [f"import {module} as m; m.value = {world.draw.randrange(9)}"],
        ["import pack, space"], ["import config0"],
    )  # fmt: skip
    world.before = world.draw.choice(choices)


def _in_place(world: _World) -> None:
    world.where = world.draw.choice(("data", "data/deep"))


def _in_dates(world: _World) -> None:
    for path in world.folder.rglob("*"):
        os.utime(path, (world.draw.randrange(10**9),) * 2)


_CHANGES: dict[str, Callable[[_World], None]] = {
    "a module": _in_module,
    "a data file": _in_file,
    "a variable": _in_variable,
    "a module that may be absent": _in_absent,
    "a module in front of another": _in_path,
    "what the script imports and sets": _in_script,
    "the working directory": _in_place,
    "dates alone": _in_dates,
    "nothing": lambda world: None,
}
#: After these, a start may load no config if everything is recorded.
_NO_CHANGES = ("dates alone", "nothing")


def dependencies(folder: Path, count: int, seed: int, changes: int = 25) -> Part:
    """Make `count` changes, so many in each world; `Line.failed` are configs that are loaded without a cause."""
    began, part, draw = time.monotonic(), Part("dependencies", seed), random.Random(seed)
    stand.prepare(folder)
    lines = {name: Line(f"a change of {name}") for name in _CHANGES}
    hits = dict.fromkeys(_CHANGES, 0)
    for number in range(-(-count // changes)):
        place = folder / f"world{number}"
        world, cache = _World(place, draw), folder / f"cache{number}"
        known: list[str] = []
        for _ in range(changes):
            name = world.change()
            targets = draw.sample(TARGETS, draw.randint(1, 2))
            fresh, found = world.start(os.devnull, targets), world.start(str(cache), targets)
            line = lines[name]
            line.count += 1
            hits[name] += not found.get("loaded", True)
            where = f"world {number}, {name}, {targets}, after {world.before}"
            if "error" in fresh or found.get("texts") != fresh["texts"]:
                part.fail(line, "wrong", f"{where}: {found} instead of {fresh}")
            elif found["loaded"] and world.recorded and not world.before and name in _NO_CHANGES:
                if {*targets} <= {*known}:
                    part.fail(line, "failed", f"{where}: a config was loaded: {found['reasons']}")
            # What is known is the state that it was started in, by a script that imports nothing itself.
            known = [*(known if name in _NO_CHANGES else ()), *targets] if not world.before else []
        for path in (place, cache):
            shutil.rmtree(path, ignore_errors=True)
    for name, line in lines.items():
        line.note = f"{hits[name]:,} starts loaded no config"
    part.lines = list(lines.values())
    part.seconds = time.monotonic() - began
    return part
