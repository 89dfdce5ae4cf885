"""The line that says what is patched: what it says, when, and in which process. With torchrun: tests/tools/cli/run/test_run.py."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.finders.conftest import HOOK, SHOW
from veomni_hook.finders import banner
from veomni_hook.finders.handle import activate_late
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.selection.process_choice import STATE as KERNELS
from veomni_hook.kernels.selection.process_choice import set_active
from veomni_hook.releases import TESTED, span
from veomni_hook.settings import BANNER_SHOWN

MODULE = "transformers.models.qwen3.modeling_qwen3"
ROUTES = [
    ("rms_norm", "cast_before_weight", "Norm.forward"),
    ("rotary", "half_split", "Attention.forward"),
    ("linear_cross_entropy", "next_token", "Model.forward"),
]
NEWER = f"transformers 5.99.0 is newer than what was tested, {span('transformers')}"
SAID = ["tiny patched at 1 place (tiny_config: 1); details: veomni-hook explain tiny", NEWER]


def applied(*others):
    """Three routes, a helper that does not count, and a user's patches by kind and config."""
    routes = [
        {"kind": "route", "op": op, "variant": v, "target": t, "config": "veomni_hook.x"}
        for op, v, t in ROUTES
    ]
    rest = [("helper", "mine:config"), ("guard", "veomni_hook.patches.models.x:config"), *others]
    return [*routes, *({"kind": kind, "target": "C.f", "config": config} for kind, config in rest)]


@pytest.fixture
def patched(monkeypatch):
    """Have a module patched, as far as the hook's state tells, in a process that no launcher started."""
    held = {name: getattr(STATE, name) for name in ("outcomes", "announced", "resolved", "registered")}
    STATE.outcomes, STATE.announced = {}, set()
    asked, active = KERNELS.asked, KERNELS.active
    for name in (BANNER_SHOWN, "VEOMNI_BANNER", *banner._RANKS):
        monkeypatch.setenv(name, "")  # also to have it restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(STATE, "process", os.getpid())
    # Activation looks at what is imported; other tests of this process make modules with slots by hand.
    for name in [each for each in sys.modules if each.endswith("_with_slots")]:
        monkeypatch.delitem(sys.modules, name)

    def put(*others: tuple[str, str], module: str = MODULE) -> None:
        STATE.outcomes[module] = Outcome(
            module=module, patched=True, read_report=lambda: {"applied": applied(*others)}
        )

    try:
        with activate_late():
            yield put
    finally:
        # Kernels that were never activated answer; deactivated ones do not.
        KERNELS.asked = asked
        set_active(active)
        for name, value in held.items():
            setattr(STATE, name, value)


def test_the_line_comes_once_and_counts_what_each_place_gets(patched, capsys):
    patched(("method_override", "mine:config"), ("rewrite", "mine:config"))
    banner.kernels_are_chosen(MODULE, None)
    assert capsys.readouterr().err == "", "a place without kernels does not know the device"
    for _ in range(2):
        banner.kernels_are_chosen(MODULE, "cpu")
    said = "veomni-hook: qwen3 patched at 5 places (torch: 3, mine: 2); details: veomni-hook explain qwen3\n"
    assert capsys.readouterr().err == said
    banner.kernels_are_chosen("transformers.models.llama.modeling_llama", "cpu")
    assert capsys.readouterr().err == "", "nobody has patched that one"


def test_names_of_families_modules_and_remote_code(patched, capsys):
    for module in ("transformers.models.donut.modeling_donut_swin", "transformers_modules.x.modeling_pebble"):
        patched(module=module)
        banner.kernels_are_chosen(module, "cpu")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("veomni-hook: donut_swin patched at 3 places (")
    assert first.endswith("details: veomni-hook explain donut_swin")
    assert second.startswith("veomni-hook: transformers_modules.x.modeling_pebble patched")
    assert second.endswith("details: veomni_hook.explain(model)")


@pytest.fixture
def heard(patched, capsys):
    """What is said of a module as if it were the first time."""

    def hear(device: str | None = "cpu") -> str:
        patched()
        STATE.announced.clear()
        banner.kernels_are_chosen(MODULE, device)
        return str(capsys.readouterr().err)

    return hear


def test_what_is_chosen_counts(heard):
    from veomni_hook.kernels.selection.binding import use_kernels

    with use_kernels("eager"):
        assert "(upstream's code: 3)" in heard(None)
    with use_kernels(rms_norm="torch", rotary="reference", linear_cross_entropy="eager"):
        assert "(reference: 1, torch: 1, upstream's code: 1)" in heard()


def test_checks_of_counts_ask_for_no_kernel(heard, monkeypatch):
    check = ("count_check", "asserted_on_device", "Model.get_placeholder_mask")
    monkeypatch.setitem(globals(), "ROUTES", [check])
    assert "patched at 1 place (checks of counts: 1)" in heard()


@pytest.mark.parametrize("variable", banner._RANKS)
def test_other_ranks_say_nothing(heard, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert heard() == ""
    monkeypatch.setenv(variable, "0")
    assert "qwen3 patched" in heard()


def test_torchs_rank_decides_where_there_is_one(heard, monkeypatch):
    def world(rank: int) -> str:
        fake = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank)
        monkeypatch.setitem(sys.modules, "torch.distributed", fake)  # type: ignore[arg-type]
        return str(heard())

    assert world(1) == ""
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: object())
    assert "qwen3 patched" in world(0)


def test_helpers_and_children_say_nothing(heard, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr("multiprocessing.process.parent_process", lambda: object())
        assert heard() == ""
    with monkeypatch.context() as context:
        context.setattr(STATE, "process", os.getpid() + 1)  # as in what is forked
        assert heard() == ""
    assert heard() != ""
    assert os.environ[BANNER_SHOWN] == str(os.getpid())
    assert heard() != "", "another family in the same process is told"
    monkeypatch.setenv(BANNER_SHOWN, str(os.getpid() + 1))
    assert heard() == "", "the parent has said it"
    monkeypatch.delenv(BANNER_SHOWN)
    with activate_late(banner=False):
        assert heard() == ""


def test_a_progress_bar_stays_whole(patched):
    """The line goes above a bar that is drawn, and the bar is drawn again."""
    code = (
        "import sys\nfrom tqdm import tqdm\nfrom veomni_hook.finders.log import say\n"
        "bar = tqdm(total=2, ascii=True, ncols=30, bar_format='{n}/{total}|')\n"
        "say('said')\nbar.update(2)\nbar.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = [part.strip() for line in done.stderr.split("\n") for part in line.split("\r")]
    assert "veomni-hook: said" in shown and shown.index("0/2|") < shown.index("veomni-hook: said")


def test_a_module_with_patches_of_users_alone(python):
    code = f"{HOOK}import subprocess, sys\n{SHOW}\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = HOOK + SHOW
    ran = python(code, child, VEOMNI_BANNER=None)
    said = "".join(f"veomni-hook: {line}\n" for line in SAID)
    assert (ran.out, ran.err) == ("103\n103\n", said), "the child has said it already"
    assert python(child, VEOMNI_BANNER="0").err == ""
    log = "import logging; logging.basicConfig(level='INFO', format='%(name)s %(message)s')\n"
    assert "veomni_hook tiny patched" not in python(log + child).err, "the fixture switches it off"
    logged = python(log + child, VEOMNI_BANNER="1")
    assert logged.err == "".join(f"veomni_hook {line}\n" for line in SAID), "logged, and not printed"


def test_a_release_newer_than_the_tested_ones_is_named_once(patched, monkeypatch, capsys):
    other = MODULE.replace("qwen3", "llama")
    patched()
    patched(module=other)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.99.0"))
    for module in (MODULE, other):
        banner.kernels_are_chosen(module, "cpu")
    first, notice, second = capsys.readouterr().err.splitlines()
    assert notice == f"veomni-hook: {NEWER}"
    assert "patched at" in first and "patched at" in second


@pytest.mark.parametrize(("release", "named"), [("5.99.0", True), (TESTED["transformers"][-1], False)])
def test_what_a_newer_release_lacks_is_named(patched, monkeypatch, capsys, release, named):
    patched()
    missed = [{"op": "rotary", "target": "Attention.forward", "status": "missed", "reason": "another form"}]
    report = {"applied": applied(), "missed": missed}
    STATE.outcomes[MODULE] = Outcome(module=MODULE, patched=True, read_report=lambda: report)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=release))
    banner.kernels_are_chosen(MODULE, "cpu")
    line = (
        "veomni-hook: qwen3 is not patched, though it looks like a kernel's code, at rotary Attention.forward"
    )
    assert (line in capsys.readouterr().err.splitlines()) is named
