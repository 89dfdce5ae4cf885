import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patches import doubling
from tests.patches.idioms.applied import spliced
from tests.patches.upstream import ROOT
from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.recognise import IDIOMS, OPTIONAL, every_idiom, idioms, recognise
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status
from veomni_hook.settings import Settings


def test_idioms_are_asked_in_their_order(idioms):
    idioms(doubling.turn, doubling.double)
    found = [(site.op, site.target) for site in recognise(Document(doubling.UPSTREAM))]
    assert found == [
        ("turn", "Attention.forward"),
        ("double", "Double.forward"),
        ("double", "Triple.forward"),
    ]


def test_a_failing_idiom_is_named_with_the_module(idioms):
    def broken(view: ModuleView) -> Iterator[Site]:
        raise KeyError("lost")
        yield

    idioms(doubling.double, broken)
    with pytest.raises(IdiomError, match=r"idiom_broken.*KeyError.*lost") as caught:
        recognise(Document("x = 1\n", "pkg.broken"))
    assert caught.value.where == "pkg.broken" and isinstance(caught.value.__cause__, KeyError)


def test_all_models_of_all_releases_are_covered_by_few_lines():
    patches = Path(recognise.__code__.co_filename).parents[1]
    specs = [*patches.glob("idioms/**/*.py"), *patches.glob("models/**/*.py")]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in specs}
    # No formulas: an evaluator of layer code (what works on each position by itself, in towers on each image, and in
    # sparse attention on each query), the parts for speech, and the layers that mix positions.
    apart = {
        "layer_loop": 3700,
        "speech": 290,
        "position_mixing": 210,
        "sample_boundaries": 140,
        "pooled_windows": 150,
    }
    rooms: Counter[str] = Counter()
    for path, number in lines.items():
        # An idiom is a file, or a folder.
        room = path.parent.name if path.parent.parent.name == "idioms" else path.stem
        rooms[room if room in apart else ""] += number
    assert rooms[""] < 8900  # with the loaders and trainers of accelerate, transformers and TRL
    for room, most in apart.items():
        assert 0 < rooms[room] < most


def test_no_idiom_asks_for_a_release():
    patches = Path(recognise.__code__.co_filename).parents[1]
    for path in [*patches.glob("idioms/**/*.py"), *patches.glob("graph/**/*.py")]:
        assert not re.search(
            r"__version__|importlib.metadata|\bversion\(", path.read_text(encoding="utf-8")
        ), path


def test_every_idiom_says_what_it_is_for() -> None:
    """And what is read as text without an import is what the module says."""
    room = Path(recognise.__code__.co_filename).parent
    texts = {path: path.read_text(encoding="utf-8") for path in room.rglob("*.py")}
    assert len([*every_idiom()]) == sum("\nCANDIDATES = " in text for text in texts.values())
    for idiom in every_idiom():
        assert idiom.OP and idiom.CANDIDATES and callable(idiom.find), idiom.__name__
        name = idiom.__name__.removeprefix(f"{room.parent.parent.name}.{room.parent.name}.{room.name}.")
        assert IDIOMS[name] == idiom.WORDS, name
        assert OPTIONAL.get(name) == getattr(idiom, "SETTING", None), name
    assert {*OPTIONAL.values()} <= {*Settings().of_text()}


@pytest.mark.parametrize(
    "name",
    ["models.qwen3.modeling_qwen3", "models.qwen3_vl.modeling_qwen3_vl", "modeling_utils", "masking_utils"],
)
def test_an_idiom_that_is_not_asked_finds_nothing(name):
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    document = Document(path.read_text(encoding="utf-8"), f"transformers.{name}")
    asked = idioms(document.source)
    left_out = [idiom for idiom in idioms() if idiom not in asked]
    assert left_out and not any(list(idiom.find(ModuleView(document))) for idiom in left_out)


def test_words_of_one_alternative_are_all_there(monkeypatch):
    monkeypatch.setitem(IDIOMS, "rotary", "turn( pairs | spin")
    (rotary,) = (idiom for idiom in idioms() if idiom.__name__.endswith(".rotary"))
    for text, is_asked in (("turn(x) # pairs", True), ("turn(x)", False), ("spin", True), ("", False)):
        assert (rotary in idioms(text)) is is_asked, text


def test_the_idiom_of_the_documents() -> None:
    text = (Path(__file__).parents[3] / "docs" / "maintain" / "idioms.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "CANDIDATES" in b)
    names: dict[str, Any] = {}
    modules = "graph routes.guards routes.view site code.scope".split()
    for module in modules:
        exec(f"from veomni_hook.patches.{module} import *", names)
    exec("from __future__ import annotations\n" + block, names)
    names["FORMULAS"] = "kernels/gated_mlp/reference.py"
    upstream = (
        "from torch.nn.functional import silu\n"
        "class Gate:\n    def forward(self, gate, up):\n        return silu(gate) * up\n"
        "class Tanh:\n    def forward(self, gate, silu):\n        return gate.tanh() + silu\n"
        "class Other:\n    def forward(self, x):\n        return x\n"
    )
    routed, missed = names["find"](ModuleView(Document(upstream)))
    assert (routed.target, routed.status) == ("Gate.forward", Status.ROUTED)
    assert "kernel(self, *operands)" in spliced(upstream, [routed])
    assert (missed.target, missed.status) == ("Tanh.forward", Status.MISSED)
    assert missed.reason.startswith("nearest is ")


POSITIONAL = """
import torch
from torch import nn
from torch.nn import functional as F

class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x, /):
        weights = F.linear(x, self.weight).softmax(-1)
        weights, indices = torch.topk(weights, 2, dim=-1)
        return weights, indices

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, /):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
"""


@pytest.mark.parametrize("parameters", ["self, x, /", "self, /, x"])
def test_a_method_whose_instance_has_no_name_gets_no_guard(parameters):
    sites = recognise(Document(POSITIONAL.replace("self, x, /", parameters)))
    assert [(site.op, site.status) for site in sites] == [("gated_mlp", Status.MISSED)]
