"""Recipes, the document that shows them, and what installs their packages agree with one another."""

import re

from packaging.version import Version

from scripts import recipes
from tests.test_packaging import pins

SCRIPTS = sorted(path.name for path in recipes.RECIPES.iterdir() if path.suffix in (".py", ".sh"))


def test_the_document_shows_every_script_as_it_is():
    document = recipes.DOCUMENT.read_text(encoding="utf-8")
    assert sorted(recipes.included(document)) == SCRIPTS
    assert recipes.written(document) == document, "python -m scripts.recipes writes it anew"


def test_the_notebook_is_made_of_its_script():
    assert recipes.NOTEBOOK.read_text(encoding="utf-8") == recipes.notebook(), "python -m scripts.recipes"


def test_constraints_of_recipes_add_to_those_of_development():
    text = (recipes.ROOT / "constraints-recipes.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))
    named = {"trl", "datasets", "ipykernel", "nbclient", "ray", "joblib", "submitit"}
    assert named <= set(pinned)
    document = recipes.DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in sorted(named) if pinned[name] not in document] == []
    assert str(pins()["peft"]) in document and str(pins()["accelerate"]) in document
    assert all(Version(version) for version in pinned.values())
    assert not set(pinned) & set(pins())
