"""The parameter that is a cache is found by what the code does with it, under any name."""

import re

import pytest
import transformers
from packaging.version import Version

from tests.patches.upstream import source_of
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import sample_boundaries
from veomni_hook.patches.idioms.layer_loop import find as layer_loop
from veomni_hook.patches.routes.cache_parameter import cache_parameters
from veomni_hook.patches.routes.view import ModuleView

HEAD = """
from ...cache_utils import Cache, DynamicCache as Growing
class Own(Cache): ...
class Plain:
    def update(self): return self.get_seq_length()
class Other(nn.Module): ...
"""
FORMS = {
    "def forward(self, x, memory: Cache | None = None): ...": ["memory"],
    "def forward(self, x, memory=None):\n        memory = Growing(config=self.config)": ["memory"],
    "def forward(self, x, *, memory=None):\n        seen = memory.get_seq_length()": ["memory"],
    "def forward(self, x, past_key_values=None): ...": ["past_key_values"],
    "def forward(self, x, cache_position=None): ...": [],
    "def forward(self, x, other: Other):\n        other = Other()": [],
    "def forward(self, x, memory):\n        local = Growing()": [],
    "def forward(self, x, one: Cache, two: Own): ...": ["one", "two"],
}

#: What 5.23 and 5.24 call it. `shard` has a parameter of one of these names.
NAME = re.compile(r"\b(past_key_values|cache_params|(?<!, )cache)\b")
WITHOUT = [("llama", sample_boundaries), ("mamba2", layer_loop)]
if Version(transformers.__version__) < Version("5.9"):  # recurrent layers of a form that is refused
    WITHOUT.append(("qwen3_next", layer_loop))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    view = ModuleView(Document(f"{HEAD}class Model(nn.Module):\n    {form}\n"))
    (forward,) = (forward for owner, forward in view.forwards() if owner.name == "Model")
    assert cache_parameters(view, forward) == FORMS[form]


@pytest.mark.parametrize("idiom", [layer_loop, sample_boundaries])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "llama"])
def test_a_renamed_cache_is_handed_on(idiom, family):
    source = source_of(family)

    def inserted(text):
        edits = [edit.text for site in idiom.find(ModuleView(Document(text))) for edit in site.edits]
        return "".join(edits)

    assert inserted(NAME.sub("memory", source)) == NAME.sub("memory", inserted(source))
    assert (family, idiom) in WITHOUT or NAME.search(inserted(source))


def test_a_model_with_two_caches_is_a_miss():
    source = source_of("qwen3_next").replace(
        "use_cache: bool | None = None,\n", "use_cache: bool | None = None, other: Cache = None,\n"
    )
    sites = [
        site for site in sample_boundaries.find(ModuleView(Document(source))) if site.status.name == "MISSED"
    ]
    assert sites and "is its cache is not known" in sites[0].reason
