"""Import hooks that are installed after ours and take a target: one warning in the run."""

import pytest

from tests.finders.conftest import SHOW, TINY, calls_of, warnings_of
from veomni_hook.finders.finder import PatchFinder

#: As typeguard's, jaxtyping's and beartype's: a finder at the front that gives a loader of its own to what it takes.
DOUBLE = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader
class TakingLoader(SourceFileLoader): pass
class TakingFinder:
    def __init__(self, prefix): self.prefix = prefix
    def find_spec(self, name, path=None, target=None):
        if not name.startswith(self.prefix): return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = TakingLoader(name, spec.loader.path)
            return spec
def take(prefix): sys.meta_path.insert(0, TakingFinder(prefix))
"""
JAXTYPING = """
from jaxtyping import install_import_hook
def take(prefix): install_import_hook(prefix, "beartype.beartype")
"""
AFTERWARDS = "import colorsys, tabnanny\n"  # any import that the other hook leaves alone
STILL = "import transformers.models.still.modeling_still\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("hook", [DOUBLE, JAXTYPING], ids=["double", "jaxtyping"])
@pytest.mark.parametrize("prefix", ["transformers.models.tiny", "transformers"])
def test_a_hook_installed_after_ours_is_one_warning(python, hook, prefix):
    ran = python(
        f"import veomni_hook.install\n{hook}\ntake({prefix!r})\n{SHOW}\n{AFTERWARDS}"
        "import transformers.models.pair_a.modeling_pair_a, wave\n",
        flags=("-W", "always"),
    )
    assert ran.out.strip() == "3", "its loader ran upstream's code"
    (said,) = warnings_of(ran.err)
    name = "TakingFinder" if hook == DOUBLE else "_JaxtypingFinder"
    assert f"an import hook ahead of veomni_hook's ({name}) loaded {TINY}" in said
    assert "stay unpatched. Fix: activate veomni_hook after it" in said


def test_under_strict_it_is_an_error(python):
    ran = python(
        f"import veomni_hook.install\n{DOUBLE}\ntake('transformers')\n{SHOW}\n"
        "for module in ('colorsys', 'wave'):\n    try: __import__(module)\n"
        "    except Exception as error: print(type(error).__name__, 'ahead of' in str(error))\n",
        VEOMNI_STRICT="1",
    )
    assert ran.out.split() == ["3", "VeomniHookError", "True", "VeomniHookError", "True"], ran.err


@pytest.mark.parametrize(
    "code",
    [
        # Before ours: both apply.
        f"{DOUBLE}\ntake('transformers')\nimport veomni_hook.install\n{SHOW}\n",
        # After ours, but it takes nothing that is patched.
        f"import veomni_hook.install\n{DOUBLE}\ntake('transformers.models.still')\n{SHOW}\n{STILL}",
        # A module that was there before is another warning.
        f"{STILL}import veomni_hook.install\n{DOUBLE}\ntake('colorsys')\n{SHOW}\n",
        # Its config imports the module that it patches.
        f"import veomni_hook.install\n{DOUBLE}\ntake('colorsys')\n{SHOW}\n",
    ],
    ids=["before", "elsewhere", "early", "nested"],
)
def test_no_warning_where_nothing_is_taken(python, code):
    ran = python(code + AFTERWARDS, flags=("-W", "always"), VEOMNI_PATCHES="importing_config")
    assert ran.out.strip() == "103", ran.err
    assert warnings_of(ran.err) == []


def test_deactivated_there_is_nothing_to_say(python):
    ran = python(
        f"import veomni_hook\n{DOUBLE}\nhandle = veomni_hook.activate(); take('transformers'); handle.deactivate()\n"
        f"{SHOW}\n{AFTERWARDS}handle = veomni_hook.activate()\nimport wave"
    )
    assert "ahead of" not in ran.err
    assert "imported too early to be patched: tiny." in ran.err


def test_an_unrelated_name_costs_a_few_calls():
    """`benchmarks.import_time` measures their time."""
    finder = PatchFinder()
    assert calls_of(lambda: finder.find_spec("json.decoder")) <= 5
