"""The proof of inserted calls: what helpers are given on the present tree, and that a loss is seen."""

import ast
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests.patches.upstream import HANDED
from tests.proof.compare import Differs
from tests.proof.inserted_calls import Checker, checked, mutants
from tests.proof.recogniser import routed_in
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import sample_boundaries
from veomni_hook.patches.idioms.layer_loop import find as layer_loop
from veomni_hook.patches.routes.view import ModuleView

#: A cache's names up to transformers 5.23, and since.
NAME = re.compile(r"\b(past_key_values|cache_params|cache)\b")
EARLY = Version(transformers.__version__) < Version("5.9")
OWN = pytest.mark.skipif(
    EARLY, reason="the cache of this release's mamba2 has methods that no other cache has"
)
CASES = [
    ("lfm2", "sample_boundaries"),
    pytest.param("mamba2", "sample_boundaries", marks=OWN),
    ("llama", "layer_loop"),
]
IDIOMS = {"sample_boundaries": sample_boundaries, "layer_loop": layer_loop}


def name_of(family):
    return f"transformers.models.{family}.modeling_{family}"


def upstreams(family):
    return Path(importlib.util.find_spec(name_of(family)).origin).read_text("utf-8")


def renamed(text):
    """The text with a cache of an unknown name, and without a single annotation."""
    tree = ast.parse(NAME.sub("memory", text))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree)


def site_of(text, family, op):
    (site,) = (site for site in routed_in(text, name_of(family), op) if site.target.endswith("Model.forward"))
    return site


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "op"), CASES)
def test_the_cache_is_proven_under_any_name(family, op):
    for text in (upstreams(family), renamed(upstreams(family))):
        found = checked(site_of(text, family, op), name_of(family), text)
        assert any(operand.endswith(": cache") for operand in found.proven)
        assert not any(operand.endswith(": cache") for operand in found.unproven)


@pytest.mark.parametrize(("family", "op"), CASES)
def test_a_lost_cache_is_no_proof(family, op):
    text = renamed(upstreams(family))
    site = site_of(text, family, op)
    # As it was while caches were known by name: None, or nothing.
    edits = [
        replace(edit, text=re.sub(r", cache=memory|\bmemory\b(?=,)", _lost, edit.text)) for edit in site.edits
    ]
    assert edits != [*site.edits]
    with pytest.raises(Differs, match=r"\bcache is not"):
        checked(replace(site, edits=tuple(edits)), name_of(family), text)


def _lost(operand):
    return "" if "=" in operand[0] else "None"


@pytest.mark.parametrize(("family", "op"), [CASES[0], CASES[2]])
def test_a_cache_that_is_no_parameter_is_a_miss(family, op):
    """What the layers get as their cache is made of a parameter of another name, so none of them is bound."""
    tree = ast.parse(renamed(upstreams(family)))
    for owner in (
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name.endswith("Model")
    ):
        for forward in (
            each for each in owner.body if isinstance(each, ast.FunctionDef) and each.name == "forward"
        ):
            text = re.sub(r"\bmemory\b(?!=)", "state", ast.unparse(forward))
            text = text.replace("memory=state", "memory=self.opened(state)").replace(
                "state.get_seq_length()", "0"
            )
            text = re.sub(r"state = \w+Cache\(", "state = new(", text).replace("memory=None", "state=None")
            owner.body[owner.body.index(forward)] = ast.parse(text).body[0]
    view = ModuleView(Document(ast.unparse(tree), name_of(family)))
    sites = [site for site in IDIOMS[op].find(view) if site.target.endswith("Model.forward")]
    assert [site.status.name for site in sites] in (["MISSED"], ["REFUSED"])
    assert re.search("cache is not known", sites[0].reason)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "op"), CASES)
def test_every_changed_argument_is_noticed(family, op):
    text = upstreams(family)
    changes = dict(mutants(site_of(text, family, op), name_of(family), text))
    assert len(changes) > 5
    assert not [label for label, noticed in changes.items() if not noticed]


@HANDED
def test_boundaries_that_no_layer_gets_are_no_proof():
    text = upstreams("qwen3_next")
    checker = Checker(site_of(text, "qwen3_next", "sample_boundaries"), name_of("qwen3_next"), text)
    for node in ast.walk(checker.texts.edited):
        if isinstance(node, ast.Assign) and "veomni_boundaries.found" in ast.unparse(node.value):
            node.targets = [ast.Name("unused", ast.Store())]
    ast.fix_missing_locations(checker.texts.edited)
    with pytest.raises(Differs, match="no layer gets the boundaries"):
        checker.check()


@HANDED
def test_mask_functions_in_a_table_get_positions():
    text = re.sub(r"\b(create_\w*mask)\(", r"{True: \1}[True](", upstreams("qwen3_next"))
    site = site_of(text, "qwen3_next", "sample_boundaries")
    assert "{True: create" in text and "masks_positions" not in "".join(edit.text for edit in site.edits)
    found = checked(site, name_of("qwen3_next"), text)
    assert any("masks_positions" in operand for operand in found.proven)
