"""What a config's patches depend on: after any change of it, the text that runs is the one of a fresh build."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.finders.conftest import TINY, Python, Ran

#: Prints the value that the config wrote, how the cache answered, and whether the config was loaded.
SHOW = f"""
import veomni_hook.install
import {TINY} as tiny
outcome = veomni_hook.install.handle.status().modules[tiny.__name__]
print(json.dumps([tiny.VALUE, outcome.cache, "team.patches" in sys.modules]))
"""
CONFIG = """
from veomni_hook import PatchConfig
{value}
config = PatchConfig("transformers.models.tiny.modeling_tiny")
config.add_post_import_block(f"VALUE = {{value!r}}")
"""
HIT, MISS, ASKED = ["hit", False], ["miss", True], ["hit", True]


class Project:
    """A folder with the package `team`, and starts of a script that its config patches."""

    def __init__(self, python: Python, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.variables: dict[str, str | None] = {}
        self.path = [str(folder)]
        self.before = ""

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def config(self, value: str) -> None:
        self.write("team/__init__.py", "")
        self.write("team/patches.py", CONFIG.format(value=value))

    def run(self, code: str, *arguments: str, **changes: str | None) -> Ran:
        variables = {"VEOMNI_PATCHES": "team.patches", **self.variables, **changes}
        ran = self.python(f"import json, sys; sys.path[:0] = {self.path!r}\n{code}", *arguments, **variables)
        assert ran.code == 0, ran.err
        return ran

    def start(self, **changes: str | None) -> list[Any]:
        """Start the script; return the value, how the cache answered, and whether the config was loaded."""
        return list(self.run(self.before + SHOW, **changes).result)

    def dumped(self) -> str:
        """What `veomni-hook dump` prints."""
        return self.run("from veomni_hook.tools.cli.app import main; main()", "dump", TINY).out


@pytest.fixture
def project(python, tmp_path):
    return Project(python, tmp_path)


class Case(NamedTuple):
    """How a config gets its value, the files that are there first, and those or the variables after the change."""

    value: str
    files: dict[str, str]
    changed: dict[str, str | None]


HERE = "import os, pathlib; here = pathlib.Path(__file__).parents[1]; "
DATA, NEW_DATA = {"data.txt": "old"}, {"data.txt": "new"}
OTHER, NEW_OTHER = {"other.py": "value = 'old'"}, {"other.py": "value = 'new'"}
VARIABLE, IN_TEAM = {"TEAM": "new"}, {"team/data.txt": "new"}

CASES = {
    "a module of a module": Case(
        "from team.common.tables import value",
        {"team/common/__init__.py": "", "team/common/tables.py": "from other import value", **OTHER},
        NEW_OTHER,
    ),
    "a namespace package": Case(
        "from space.deep import value", {"space/deep.py": "value = 'old'"}, {"space/deep.py": "value = 'new'"}
    ),
    "a package's own code": Case(
        "import common.consts as consts; from common import value",
        {"common/__init__.py": "value = 'old'", "common/consts.py": ""},
        {"common/__init__.py": "value = 'new'"},
    ),
    "importlib": Case("from importlib import import_module; value = import_module('oth' + 'er').value", OTHER, NEW_OTHER),
    "an import in a function": Case(
        "from lazily import get; value = get()",
        {"lazily.py": "def get():\n    from other import value\n    return value", **OTHER},
        NEW_OTHER,
    ),
    "runpy": Case(HERE + "import runpy; value = runpy.run_path(str(here / 'other.py'))['value']", OTHER, NEW_OTHER),
    "a module that is not there": Case("try:\n    from other import value\nexcept ImportError:\n    value = 'old'", {}, NEW_OTHER),
    "a submodule that is not there": Case(
        "import team\ntry:\n    from team import extra; value = extra.value\nexcept ImportError:\n    value = 'old'",
        {},
        {"team/extra.py": "value = 'new'"},
    ),
    "a module that another folder hides": Case("from other import value", {"second/other.py": "value = 'old'"}, NEW_OTHER),
    "open": Case(HERE + "value = open(here / 'data.txt').read()", DATA, NEW_DATA),
    "pathlib": Case(HERE + "value = (here / 'data.txt').read_text()", DATA, NEW_DATA),
    "os.open": Case(HERE + "value = os.read(os.open(here / 'data.txt', 0), 9).decode()", DATA, NEW_DATA),
    "io.FileIO": Case(HERE + "import io; value = io.FileIO(here / 'data.txt').read().decode()", DATA, NEW_DATA),
    "a module that reads": Case(
        "from parts.reader import value", {**DATA, "parts/reader.py": HERE + "value = (here / 'data.txt').read_text()"}, NEW_DATA
    ),
    "importlib.resources": Case(
        "from importlib.resources import files; value = files('team').joinpath('data.txt').read_text()", {"team/data.txt": "old"}, IN_TEAM
    ),
    "pkgutil.get_data": Case("import pkgutil; value = pkgutil.get_data('team', 'data.txt').decode()", {"team/data.txt": "old"}, IN_TEAM),
    "a file that is not there": Case(
        HERE + "\ntry:\n    value = open(here / 'data.txt').read()\nexcept OSError:\n    value = 'old'", {}, NEW_DATA
    ),
    "a file that is asked for": Case(HERE + "value = 'new' if os.path.exists(here / 'data.txt') else 'old'", {}, NEW_DATA),
    "a path that is asked for": Case(HERE + "value = 'new' if (here / 'data.txt').is_file() else 'old'", {}, NEW_DATA),
    "os.listdir": Case(HERE + "value = 'new' if 'data.txt' in os.listdir(here / 'team') else 'old'", {}, IN_TEAM),
    "os.scandir": Case(HERE + "value = 'new' if 'data.txt' in [e.name for e in os.scandir(here / 'team')] else 'old'", {}, IN_TEAM),
    "glob": Case(HERE + "import glob; value = 'new' if glob.glob(f'{here}/team/*.txt') else 'old'", {}, IN_TEAM),
    "a glob of a path": Case(
        HERE + "value = 'new' if [*(here / 'team').glob('**/*.txt')] else 'old'",
        {"team/deep/er/x.py": ""},
        {"team/deep/er/data.txt": ""},
    ),
    "os.environ[]": Case("import os; value = os.environ['TEAM']", {}, VARIABLE),
    "os.environ.get": Case("import os; value = os.environ.get('TEAM')", {}, VARIABLE),
    "os.getenv": Case("from os import getenv; value = getenv('TEAM')", {}, VARIABLE),
    "environ from os": Case("from os import environ; value = environ['TEAM']", {}, VARIABLE),
    "os.environb": Case("import os; value = os.environb[b'TEAM'].decode()", {}, VARIABLE),
    "in os.environ": Case("import os; value = 'old' if 'TEAM' in os.environ else 'new'", {}, {"TEAM": None}),
    "an unset variable": Case("import os; value = os.environ.get('UNSET', 'old')", {}, {"UNSET": "new"}),
    "expandvars": Case("import os; value = os.path.expandvars('$TEAM')", {}, VARIABLE),
    "expanduser": Case("import pathlib; value = pathlib.Path('~/x').expanduser().parent.name", {}, {"HOME": "/new"}),
    "a module that reads a variable": Case("from reader import value", {"reader.py": "import os; value = os.environ['TEAM']"}, VARIABLE),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_a_config_depends_on_is_seen(project, name):
    value, files, changed = CASES[name]
    project.variables = {"TEAM": "old", "HOME": "/old"}
    project.path.append(str(project.folder / "second"))
    for path, text in files.items():
        project.write(path, text)
    project.config(value)
    assert [project.start(), project.start()] == [["old", *MISS], ["old", *HIT]]
    assert "VALUE = 'old'" in project.dumped()
    for place, text in changed.items():
        project.write(place, text) if "." in place else project.variables.update({place: text})
    assert [project.start(), project.start()] == [["new", *MISS], ["new", *HIT]]
    assert "VALUE = 'new'" in project.dumped()


ALWAYS = {
    "all variables": "import os; value = dict(os.environ)['TEAM']",
    "a copy of the environment": "import os; value = os.environ.copy()['TEAM']",
    "variables by their prefix": "import os; value = [os.environ[n] for n in os.environ if n.startswith('TEA')][0]",
    "a process": "import subprocess; value = subprocess.check_output(['sh', '-c', 'printf $TEAM']).decode()",
    "os.popen": "import os; value = os.popen('printf $TEAM').read()",
    "os.system": "import os; os.environ['TEAM']; os.system('true'); value = os.environ['TEAM']",
    "a thread": "import threading, os; got = []; t = threading.Thread(target=lambda: got.append(os.environ['TEAM'])); t.start(); t.join(); value = got[0]",
    "a socket": "import os, socket; socket.gethostname(); value = os.environ['TEAM']",
    "a variable that it sets": "import os; os.environ['OWN'] = os.environ['TEAM']; value = os.environ['OWN']",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALWAYS)
def test_a_config_whose_dependencies_cannot_be_recorded_is_loaded_at_every_start(project, name):
    """Its patches are digested: the module is patched again only if they have changed, and both forms stay."""
    project.config(ALWAYS[name])
    answers = []
    for value in ("old", "old", "new", "new", "old"):
        project.variables = {"TEAM": value}
        answers.append(project.start())
        assert f"VALUE = {value!r}" in project.dumped()
    assert answers == [
        ["old", *MISS], ["old", *ASKED], ["new", *MISS], ["new", *ASKED], ["old", *ASKED]
    ]  # fmt: skip


@pytest.mark.slow
def test_modules_that_are_imported_before_their_config_are_watched(project):
    """What they read was not recorded then: the file, the variable, and what the script does to them count."""
    project.config("from common.consts import value")
    project.write("common/__init__.py", "")
    project.write("common/consts.py", "import os\nvalue = os.environ['TEAM']")
    project.before = "import common.consts\n"
    project.variables = {"TEAM": "old"}
    assert [project.start(), project.start()] == [["old", *MISS], ["old", *ASKED]]
    project.variables = {"TEAM": "new"}
    assert project.start() == ["new", *MISS]
    project.before = "import common.consts; common.consts.value = 'set'\n"
    assert project.start() == ["set", *MISS]
    project.before = ""
    assert [project.start(), project.start()] == [["new", *ASKED], ["new", *HIT]]
    project.before = "import common.consts; common.consts.value = 'set'\n"
    assert project.start() == ["set", *ASKED]


def test_a_package_that_the_script_has_imported_does_not_count_for_its_submodules(project):
    project.config("from common import consts; value = consts.value")
    project.write("common/__init__.py", "")
    project.write("common/consts.py", "value = 'old'")
    project.before = "import common, team\n"
    assert [project.start(), project.start()] == [["old", *MISS], ["old", *HIT]]


@pytest.mark.slow
def test_each_value_of_a_variable_has_its_own_entry(project):
    """As where ranks differ: an entry of another one is found by what the configs say, and nothing is patched."""
    project.config("import os; value = os.environ['TEAM']")
    answers = [project.start(TEAM=value) for value in ("a", "b", "a", "a", "b")]
    assert answers == [["a", *MISS], ["b", *MISS], ["a", *ASKED], ["a", *HIT], ["b", *ASKED]]


def test_a_relative_path_is_relative_to_where_the_script_starts(project):
    project.config("import os; value = os.path.abspath('.')[-5:] + open('data.txt').read()")
    answers = []
    for folder in ("one-1", "one-1", "two-2"):
        project.write(f"{folder}/data.txt", folder[-1])
        project.before = f"import os; os.chdir({str(project.folder / folder)!r})\n"
        answers.append(project.start())
    assert answers == [["one-11", *MISS], ["one-11", *HIT], ["two-22", *MISS]]


def linked(project, value):
    (project.folder / "current").unlink(missing_ok=True)
    (project.folder / "current").symlink_to(value)
    project.write(f"{value}/data.txt", value)


def zipped(project, value):
    project.path.append(str(project.folder / "zipped.zip"))
    with zipfile.ZipFile(project.folder / "zipped.zip", "w") as file:
        file.writestr("zipped_consts.py", f"value = {value!r}")


def editable(project, value):
    project.before = f"""
import importlib.util
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "editable_consts":
            return importlib.util.spec_from_file_location(name, {str(project.folder / "elsewhere/consts.py")!r})
sys.meta_path.append(Finder())
"""
    project.write("elsewhere/consts.py", f"value = {value!r}")


def distributed(project, value):
    project.write("team-1.dist-info/RECORD", "team/__init__.py,,\nteam/patches.py,,\nteam/consts.py,,\n")
    project.write("team/consts.py", f"value = {value!r}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("config", "write"),
    [
        (HERE + "value = (here / 'current').resolve().joinpath('data.txt').read_text()", linked),
        ("from zipped_consts import value", zipped),
        ("from editable_consts import value", editable),
        ("from team.consts import value", distributed),
    ],
    ids=["a link", "an archive", "an editable install", "a config's own distribution"],
)
def test_a_value_from_elsewhere_is_watched(project, config, write):
    project.config(config)
    for value in ("old", "new"):
        write(project, value)
        assert [project.start(), project.start()] == [[value, *MISS], [value, *HIT]]


@pytest.mark.slow
def test_an_installed_distribution_counts_by_its_list_of_files(project):
    """Its modules may be imported before, read variables and be many: a start looks at one file."""
    project.config("from installed.consts import value")
    site = project.folder / "site"
    project.path.append(str(site))

    def install(version: str) -> None:
        for info in site.glob("*.dist-info"):
            (info / "RECORD").unlink()
            info.rmdir()
        project.write("site/installed/__init__.py", "")
        project.write("site/installed/consts.py", f"import os; os.environ.copy()\nvalue = {version!r}")
        listed = "installed/__init__.py,,\ninstalled/consts.py,sha256=x,1\n"
        project.write(f"site/installed-{version}.dist-info/RECORD", listed)

    install("old")
    assert [project.start(), project.start()] == [["old", *MISS], ["old", *HIT]]
    project.before = "import installed.consts\n"
    assert project.start() == ["old", *HIT]
    install("new")
    assert [project.start(), project.start()] == [["new", *MISS], ["new", *HIT]]


def test_a_changed_comment_above_a_replacement_is_a_change(project):
    """Also where configs are registered: the whole text that is taken over is in the key."""
    project.before = "from veomni_hook import register; import team.patches; register(team.patches.config)\n"
    for value in ("old", "new"):
        project.config("value = 1")
        text = (project.folder / "team/patches.py").read_text()
        override = f'\n# said: {value}\n@config.override_method("TinyNorm.forward")\ndef forward(self, x):\n    return 1\n'
        project.write("team/patches.py", text + override)
        show = f"import {TINY} as tiny; print(open(tiny.__file__).read())"
        ran = project.run(f"import veomni_hook.install\n{project.before}{show}", VEOMNI_PATCHES=None)
        assert f"# said: {value}" in ran.out, ran.err


def test_recording_leaves_the_process_as_it_was(project):
    project.config("import os; value = os.environ['TEAM'], os.stat in os.supports_dir_fd")
    project.variables = {"TEAM": "old"}
    project.before = """
import builtins, importlib, os
def state():
    return [builtins.__import__, importlib._bootstrap._gcd_import, os.stat, os.lstat, os.access, os.readlink,
            os.getcwd, os.getcwdb, type(os.environ), type(os.environb)]
before = state()
import atexit
atexit.register(lambda: print(state() == before, file=sys.stderr))
"""
    ran = project.run(project.before + SHOW)
    assert ran.result == [["old", True], *MISS]
    assert ran.err.splitlines()[-1] == "True"


def test_what_a_config_wraps_itself_stays_wrapped(project):
    project.config(
        "import os; first = os.stat\ndef stat(*a, **k):\n    return first(*a, **k)\nos.stat = stat\nvalue = 1"
    )
    code = "print(json.dumps([os.stat.__name__, os.stat('.').st_size > 0]))"
    assert project.run(f"import veomni_hook.install, {TINY}, os\n{code}").result == ["stat", True]


def test_other_threads_are_not_recorded(project):
    """A loader of data that reads files and variables while a config loads is none of its business."""
    project.config("import time, other; time.sleep(0.3); value = other.value")
    project.write("other.py", "value = 'old'")
    project.before = f"""
import os, subprocess, threading
ended = threading.Event()
def work():
    while not ended.wait(0.01):
        os.environ.copy(), os.listdir({str(project.folder)!r}), os.stat('.'), open({str(project.folder / "log")!r}, 'a').write('.')
thread = threading.Thread(target=work, daemon=True)
thread.start()
import atexit
atexit.register(ended.set)
"""
    assert [project.start(), project.start()] == [["old", *MISS], ["old", *HIT]]


def test_a_definition_that_is_taken_from_an_installed_module_is_watched(project):
    """Edited in place, too; a module that a patch only names is not imported for it."""
    project.config("from installed import consts, named; value = 'same'")
    with (project.folder / "team/patches.py").open("a") as file:
        file.write("""
config.replace_class("TinyNorm", consts.Norm)
from veomni_hook import create_patch_from_external
config.add_patch(create_patch_from_external("TinyModel", "installed.external", "TinyModel"))
""")
    project.path.append(str(project.folder / "site"))
    project.write("site/installed/__init__.py", "")
    project.write("site/installed/named.py", "")
    project.write("site/installed/external.py", "class TinyModel:\n    pass")
    project.write(
        "site/installed-1.dist-info/RECORD",
        "installed/__init__.py,,\ninstalled/consts.py,,\ninstalled/named.py,,\n",
    )
    norm = "class Norm:\n    def __init__(self, bias=1):\n        self.bias = {}\n    def forward(self, x):\n        return x\n"
    for number in (1, 2):
        project.write("site/installed/consts.py", norm.format(number))
        assert [project.start()[1:], project.start()[1:]] == [MISS, HIT]
    project.write("site/installed/external.py", "class Renamed:\n    pass")
    with pytest.raises(AssertionError, match=r"installed\.external\.TinyModel does not exist"):
        project.start()


@pytest.mark.slow
def test_what_the_import_of_an_installed_module_reads_does_not_count(project):
    """torch reads hundreds of files, and variables that every rank has another of."""
    project.config("import torch; value = 'same'")
    project.variables = {"LOCAL_RANK": "0"}
    assert [project.start(), project.start(LOCAL_RANK="1")] == [["same", *MISS], ["same", *HIT]]
