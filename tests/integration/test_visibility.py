"""Every Qwen3 class, patched or not: introspection answers as for the unpatched module, save the patch."""

import difflib
from pathlib import Path

import pytest

from tests.importing import POSITIONS_ARE_COUNTED
from tests.processes import facts as facts_of
from tests.processes import started

SCRIPT = Path(__file__).with_name("facts_of_qwen3.py")
PATCHED = {
    "Qwen3RMSNorm": "forward", "Qwen3DecoderLayer": "forward", "Qwen3MLP": "forward",
    "Qwen3Attention": "forward", "Qwen3ForCausalLM": "forward",
    **({"Qwen3Model": "forward"} if POSITIONS_ARE_COUNTED else {}),
}  # fmt: skip
#: Kernels replace several statements of them.
COPIED = ("Qwen3DecoderLayer", "Qwen3Attention")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    running = {mode: started(SCRIPT, mode, cache=cache) for mode in ("patched", "unpatched")}
    return {mode: facts_of(process) for mode, process in running.items()}


def test_the_patched_run_is_patched(facts):
    assert Path(facts["patched"]["file"]).parts[-3:] == ("models", "qwen3", "modeling_qwen3.py")
    assert facts["patched"]["file"] != facts["unpatched"]["file"]
    for name, method in PATCHED.items():
        source = facts["patched"]["classes"][name]["methods"][method]["source"]
        assert "veomni_" in source, name


def test_untouched_classes_and_functions_are_upstreams_text(facts):
    for kind in ("classes", "functions"):
        copies = {f"veomni_{name}_forward" for name in COPIED} if kind == "functions" else set()
        assert facts["patched"][kind].keys() == facts["unpatched"][kind].keys() | copies
        for name, unpatched in facts["unpatched"][kind].items():
            if name not in PATCHED:
                assert facts["patched"][kind][name] == unpatched, name


def test_patched_classes_differ_in_inserted_lines_only(facts):
    for name, method in PATCHED.items():
        patched, unpatched = (dict(facts[mode]["classes"][name]) for mode in ("patched", "unpatched"))
        methods = patched.pop("methods"), unpatched.pop("methods")
        patched.pop("source"), unpatched.pop("source")
        assert patched == unpatched, name
        assert methods[0].keys() == methods[1].keys()
        for own in methods[0].keys() - {method}:
            assert methods[0][own] == methods[1][own], (name, own)
        before, after = dict(methods[1][method]), dict(methods[0][method])
        old, new = before.pop("source"), after.pop("source")
        assert after == before, (name, method)
        removed = [
            line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line.startswith("- ")
        ]
        assert len(removed) == (1 if name == "Qwen3Attention" else 0), removed


def test_sources_are_served_from_the_file_that_runs(facts):
    for cls in facts["patched"]["classes"].values():
        assert cls["pickled"] is True
        assert all(method["line_is_served"] is True for method in cls["methods"].values())


def test_the_modules_names_gain_only_ours_and_transformers_reads_the_same(facts):
    patched, unpatched = facts["patched"], facts["unpatched"]
    more = set(patched["names"]) - set(unpatched["names"])
    assert set(unpatched["names"]) <= set(patched["names"])
    assert [name for name in more if not name.lower().startswith("veomni")] == []
    assert patched["all"] == unpatched["all"]
    assert patched["can_set_experts"] == unpatched["can_set_experts"]
    for name in ("Qwen3Model", "Qwen3ForCausalLM"):
        docs = [each["classes"][name]["doc"] for each in (patched, unpatched)]
        assert docs[0] and docs[0] == docs[1]


def test_training_saving_generating_agree(facts):
    patched, unpatched = facts["patched"]["training"], facts["unpatched"]["training"]
    assert patched["loss"] == pytest.approx(unpatched["loss"], rel=1e-5)
    assert patched["gradients"] == pytest.approx(unpatched["gradients"], rel=1e-4)
    assert patched["logits"] == pytest.approx(unpatched["logits"], rel=1e-4, abs=1e-4)
    assert patched["copies_agree"] is True
    assert patched["one_class_everywhere"] is True
    assert patched["generated"] == unpatched["generated"]
    assert patched["state"] == unpatched["state"]
