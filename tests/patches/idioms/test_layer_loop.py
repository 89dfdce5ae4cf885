import ast
import gc
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

from tests.once import once
from tests.patches.idioms.applied import in_lines, spliced
from tests.patches.idioms.layer_loops import CALL, DECODER, EMBEDDINGS, changed, sites
from tests.patches.upstream import MODELS, source_of
from tests.processes import facts as facts_of
from tests.processes import started
from veomni_hook.finders.build import patch_with_idioms
from veomni_hook.finders.upstream import Upstream
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.idioms.layer_loop import find as idiom
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Status
from veomni_hook.settings import Settings
from veomni_hook.tools.coverage import examine, totals

ORIGIN = Origin("transformers.models.tiny.modeling_tiny", "modeling_tiny.py", "transformers", "0")
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3")
#: Linear attention whose rules are shared.
LINEAR = {"qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "bailing_hybrid"}
#: At least so many loops of base models are supported, by release.
SUPPORTED = {"5.2.0": 66, "5.9.0": 86, "5.17.0": 106, "5.23.0": 128}


LAYER_LOOPS = "layer_loop.find"


def patched(text, *, optional=(LAYER_LOOPS,)):
    return patch_source(text, [], ORIGIN, idioms=True, optional=optional).text


def on_one_line(text):
    """The text with each call of `shard` on one line, without the cache that loops may pass."""
    return re.sub(r"shard\(\s*([^)]*?)(?:, cache=(?:past_key_values|cache))?\s*\)", r"shard(\1)", text)


def calls(text):
    """The statements with calls of the runtime, in order, each on one line."""
    return [
        on_one_line(ast.unparse(node))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign | ast.Expr) and "veomni_sequence." in ast.unparse(node)
    ]


CUT = "hidden_states, position_embeddings = veomni_sequence.shard(self, hidden_states, position_embeddings)"
JOIN = "hidden_states = veomni_sequence.gather(self, hidden_states)"


def test_the_layers_are_between_a_cut_and_a_join_and_nothing_else_changes():
    (site,) = sites(DECODER)
    assert (site.target, site.status, site.variant) == ("TinyModel.forward", Status.ROUTED, "sharded")
    text = on_one_line(spliced(DECODER, [site]))
    lines = text.splitlines()
    cut, join = lines.index(f"        {CUT}"), lines.index(f"        {JOIN}")
    assert lines[cut - 2].strip().startswith("# [ROUTED]") or "# [ROUTED]" in lines[cut - 1]
    assert lines[cut + 1].strip() in (
        "# The layers.",
        "for decoder_layer in self.layers[: self.config.num_hidden_layers]:",
    )
    assert lines[join - 2].strip() == "hidden_states = self.norm(hidden_states)"
    assert lines[join + 1].strip().startswith("return ")
    rest = [line for line in lines if "veomni_sequence" not in line and "# [ROUTED]" not in line]
    assert rest == DECODER.splitlines()


def test_the_cache_that_the_layers_fill_is_passed():
    for family in FAMILIES:
        assert (
            len(re.findall(r"shard\([^)]*cache=(?:past_key_values|cache)\s", patched(source_of(family)))) == 1
        )


def test_without_shared_sequences_the_text_is_that_of_the_other_idioms():
    assert "veomni_sequence" not in patched(DECODER, optional=())
    for family in FAMILIES:
        text = source_of(family)
        off, on = (patched(text, optional=asked) for asked in ((), (LAYER_LOOPS,)))
        assert "veomni_sequence" not in off and "sequence parallelism" not in off
        added = (
            "veomni_sequence",
            "sequence parallelism",
            "[ADDED IMPORTS] for the patches",
            "[MODIFIED CLASS]",
        )
        kept = [
            line for line in on_one_line(on).splitlines() if line and not any(word in line for word in added)
        ]
        others = [line for line in on_one_line(off).splitlines() if line]
        assert kept == [line for line in others if not any(word in line for word in added)]


@pytest.mark.parametrize(("parallel", "count"), [("", 0), ("ep=2", 0), ("sp=2", 1), ("sp=4,ep=2", 1)])
def test_the_setting_decides(parallel, count):
    text = source_of("llama")
    upstream = Upstream(
        "transformers.models.llama.modeling_llama", "modeling_llama.py", text.encode(), "transformers", "0"
    )
    made, failed = patch_with_idioms(upstream, [], Settings(parallel=parallel))
    assert not failed and made is not None
    assert made.text.count("veomni_sequence.shard(") == count


LAYER = "        for decoder_layer in self.layers[: self.config.num_hidden_layers]:\n"
SHORT = "hidden_states, attention_mask=causal_mask, position_embeddings=position_embeddings"


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        pytest.param(
            [("TinyNorm(config.hidden_size)\n", "TinyNorm(config.hidden_size).to(dtype=torch.float32)\n")],
            CUT,
            id="a module that is moved when it is made",
        ),
        pytest.param(
            [(LAYER, "        for i, decoder_layer in enumerate(self.layers):\n")], CUT, id="numbered layers"
        ),
        pytest.param(
            [
                (
                    CALL,
                    f"            outputs = decoder_layer({SHORT})\n            hidden_states = outputs[0]\n",
                ),
                ("        return hidden_states + self.mlp", "        return (hidden_states + self.mlp"),
                (
                    "self.mlp(hidden_states)\n\nclass TinyModel",
                    "self.mlp(hidden_states), None)\n\nclass TinyModel",
                ),
            ],
            CUT,
            id="a tuple's first element",
        ),
        pytest.param(
            [
                (EMBEDDINGS, "        cos, sin = self.rotary_emb(hidden_states, position_ids)\n"),
                (
                    CALL,
                    f"            hidden_states = decoder_layer({SHORT.replace('=position_embeddings', '=(cos, sin)')})\n",
                ),
            ],
            "hidden_states, cos, sin = veomni_sequence.shard(self, hidden_states, cos, sin)",
            id="two names",
        ),
        pytest.param(
            [
                (
                    EMBEDDINGS,
                    "        position_embeddings = {}\n        for kind in set(self.config.layer_types):\n"
                    "            position_embeddings[kind] = self.rotary_emb(hidden_states, position_ids)\n",
                ),
                (LAYER, "        for i, decoder_layer in enumerate(self.layers):\n"),
                (CALL, f"            hidden_states = decoder_layer({SHORT}[self.config.layer_types[i]])\n"),
            ],
            CUT,
            id="a dictionary by type",
        ),
        pytest.param(
            [
                (CALL, CALL.replace("=position_embeddings", "=position_embeddings if i % 2 else None")),
                (LAYER, "        for i, decoder_layer in enumerate(self.layers):\n"),
                (
                    "        cos, sin = position_embeddings\n",
                    "        if position_embeddings is not None:\n            cos, sin = position_embeddings\n",
                ),
                ("        query, key = apply", "            query, key = apply"),
            ],
            CUT,
            id="layers without positions",
        ),
        pytest.param(
            [
                ("position_ids[:, None, :]", "position_ids[0][:, None, :]"),
                ("position_ids.shape[0]", "position_ids.shape[1]"),
            ],
            CUT,
            id="several kinds of positions",
        ),
        pytest.param(
            [
                (
                    "        inv_freq = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)\n",
                    "        if position_ids.ndim == 2:\n"
                    "            position_ids = position_ids[None].expand(3, position_ids.shape[0], -1)\n"
                    "        inv_freq = self.inv_freq[None, None, :, None].expand(3, position_ids.shape[1], -1, 1)\n",
                ),
                (
                    "position_ids[:, None, :].float()).transpose(1, 2)",
                    "position_ids[:, :, None, :].float()).transpose(2, 3)[0]",
                ),
            ],
            CUT,
            id="one kind of positions that is repeated",
        ),
    ],
)
def test_forms_that_are_supported(changes, cut):
    text = changed(*changes)
    (site,) = sites(text)
    assert (site.status, site.reason) == (Status.ROUTED, "")
    assert calls(spliced(text, [site])) == [cut, JOIN]


def test_without_a_norm_right_behind_the_loop_the_join_is_there():
    text = changed(("        hidden_states = self.norm(hidden_states)\n", "        note = 1\n"))
    (site,) = sites(text)
    assert f"{JOIN}\n        note = 1" in spliced(text, [site])
    mixing = changed(
        (
            "        hidden_states = self.norm(hidden_states)\n",
            "        hidden_states = self.head(hidden_states)\n",
        )
    )
    (site,) = sites(mixing)
    assert f"{JOIN}\n        hidden_states = self.head" in spliced(mixing, [site])


IN_MLP = "        return self.down_proj(self.act_fn(self.up_proj(x)))\n"
SCORES = "        attn_output, attn_weights = attention_interface(\n            self, query, key, value, attention_mask, scaling=self.head_dim**-0.5, **kwargs\n        )\n"


PARTS = "        for part in self.parts:\n"


def mlp(code):
    """A change of the MLP's body."""
    return [(IN_MLP, f"        {code}\n{IN_MLP}")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (mlp("x = x.cumsum(dim=1)"), "a cumulative sum along the positions"),
        (mlp("x = x - x.mean(dim=1, keepdim=True)"), "a mean along the positions"),
        (mlp("x = x[:, 1:]"), "takes a part of the positions"),
        (mlp("x = x[:, -1]"), "picks positions by an index"),
        (mlp("x = torch.roll(x, 1, dims=1)"), "calls roll, which may mix positions"),
        (mlp("x = torch.cat([x, x], dim=1)"), "a concatenation along the positions"),
        (mlp("x = x.transpose(1, 2)"), "a linear layer along the positions"),
        (mlp("x = x.reshape(x.shape[0], 7, -1)"), "a reshape that may move positions"),
        (mlp("x = torch.einsum('bsh,bth->bst', x, x)"), "calls einsum, which may mix positions"),
        (mlp("x = (x @ x.transpose(1, 2)) @ x"), "every position is multiplied with every other one"),
        (mlp("x = x + self.bias[: x.shape[1]]"), "computes with the number of positions"),
        (mlp("if x.shape[1] > 8:\n            x = x * 2"), "computes with the number of positions"),
        (mlp("if x[..., 0] > 0:\n            x = x * 2"), "a branch depends on values of some positions"),
        (mlp(f"part = 0\n        number = 0\n{PARTS}            x = x * 2 if number == 0 else x.cumsum(1)\n            number += 1"), "a cumulative sum along the positions"),
        (mlp(f"part = 0\n        first = True\n{PARTS}            if not first:\n                x = x.cumsum(1)\n            first = False"), "a cumulative sum along the positions"),
        (mlp("self.last = x"), "keeps a value beyond the call: self.last"),
        (mlp("x = create_causal_mask(x)"), "calls create_causal_mask, which is not followed"),
        (mlp("x = self.scan(x)"), "calls self.scan, which is not followed"),
        (mlp("while x is not None:\n            x = None"), "While is not followed"),
        (mlp("x = x + torch.rand(3)"), "draws random numbers"),
        ([*mlp("x = self.mix(x)"), ("        self.act_fn =", "        self.mix = nn.Conv2d(1, 1, 1)\n        self.act_fn =")], "torch's Conv2d"),
        ([*mlp("x = self.mix(x)"), ("        self.act_fn =", "        self.mix = nn.Conv1d(1, 1, 1)\n        self.act_fn =")], "convolutions along the positions: TinyMLP"),
        ([*mlp("x = chunk_delta_rule(x)")], "recurrent layers: TinyMLP"),
        ([(SCORES, "        weights = torch.matmul(query, key.transpose(2, 3))\n        attn_output = torch.matmul(weights, value)\n")], "every position is multiplied"),
        ([("self, query, key, value, attention_mask, scaling", "self, query, key, value, attention_mask[..., :4], scaling")], "takes a part of causal_mask"),
        ([("self, query, key, value, attention_mask, scaling", "self, query.transpose(1, 2), key, value, attention_mask, scaling")], "the query of its attention is not"),
        ([("scaling=self.head_dim**-0.5, **kwargs", "position_bias=self.bias, **kwargs")], "its attention takes position_bias"),
        ([("        cos, sin = position_embeddings\n", "        cos, sin = position_embeddings\n        query = query * attention_mask\n")], "computes with causal_mask, which holds all positions"),
        ([("        cos, sin = position_embeddings\n", "        cos, sin = position_embeddings\n        query = query * kwargs['position_ids']\n")], "computes with **kwargs, which holds all positions"),
        ([(", self.layer_idx)\n", ", self.layer_idx)\n            length = past_key_values.get_seq_length()\n")], "asks past_key_values for get_seq_length"),
        ([("ALL_ATTENTION_FUNCTIONS.get_interface(\n            self.config._attn_implementation, eager_attention_forward\n        )", "eager_attention_forward")], "every position is multiplied"),
        ([(CALL, CALL + "            everything += (hidden_states,)\n")], "layers' outputs are collected inside the loop"),
        ([(CALL, CALL + "            deepstack = self.deepstack_process(hidden_states, features)\n")], "deepstack"),
        ([(CALL, CALL.replace("**kwargs", "per_layer_input=kwargs['per_layer_inputs'][..., 0]"))], "per-layer inputs"),
        ([(CALL, CALL.replace("**kwargs", "encoder_hidden_states=encoder_hidden_states"))], "cross attention"),
        ([(CALL, f"            if torch.rand([]) < self.layerdrop:\n                continue\n{CALL}")], "skipped at random"),
        ([(CALL, f"{CALL}            return hidden_states\n")], "a loop is left before its end"),
        ([(CALL, f"{CALL}            hidden_states = hidden_states[:, :4]\n")], "takes a part of the positions"),
        ([(CALL, f"{CALL}            outputs = hidden_states\n"), ("past_key_values=past_key_values)\n", "outputs=outputs)\n")], "outputs is used after the loop"),
        ([("past_key_values=past_key_values)\n", "rotary=position_embeddings)\n")], "position_embeddings is sliced for the layers and used after them"),
        ([(LAYER + CALL, LAYER + CALL + LAYER + CALL)], "another loop over layers"),
        ([(LAYER, LAYER.replace("        for", "        if self.deep:\n          for"))], "inside another statement"),
        ([("hidden_states = inputs_embeds\n", "hidden_states = inputs_embeds.transpose(0, 1)\n")], "how hidden_states are made is not followed"),
        ([("[TinyLayer(config, i) for", "[make(config, i) for")], "the classes of the layers are not known"),
        ([("import ALL_ATTENTION_FUNCTIONS", "import TinyMLP2, ALL_ATTENTION_FUNCTIONS"), ("self.mlp = TinyMLP(", "self.mlp = TinyMLP2(")], "TinyMLP2 is a class of another file"),
        ([("    def forward(self, x):\n        return self.down", "    @cached\n    def forward(self, x):\n        return self.down")], "decorated with cached"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_may_mix_positions_is_refused_with_its_reason(changes, reason):
    text = changed(*changes)
    (site,) = sites(text)
    assert site.status is Status.REFUSED and reason in site.reason
    (call,) = calls(spliced(text, [site]))
    assert call == in_lines(f"veomni_sequence.refused(self, {json.dumps(site.reason)})")


def test_a_subclass_with_other_layers_is_checked_too():
    more = (
        "\n\nclass MixedModel(TinyModel):\n    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.layers = nn.ModuleList([MixedLayer(config, i) for i in range(2)])\n\n\n"
        "class MixedLayer(TinyLayer):\n    def forward(self, hidden_states, position_embeddings=None, **kwargs):\n"
        "        return hidden_states{}\n"
    )
    (site,) = sites(DECODER + more.format(" * 2"))
    assert site.status is Status.ROUTED
    (site,) = sites(DECODER + more.format(".cumsum(1)"))
    assert site.status is Status.REFUSED and "MixedLayer.forward: a cumulative sum" in site.reason


def test_what_the_module_replaces_later_is_not_taken_for_the_code_that_runs():
    rows = examine(ORIGIN.module, f"{DECODER}\n\nTinyMLP.forward = other\n", optional=(LAYER_LOOPS,))
    assert not [row for row in rows if row.op == "layer_loop" and row.status == "routed"]
    refused = changed(*mlp("x = x.cumsum(1)"))
    rows = examine(ORIGIN.module, f"{refused}\n\nTinyMLP.forward = other\n", optional=(LAYER_LOOPS,))
    (row,) = [row for row in rows if row.op == "layer_loop"]
    assert (row.status, row.edited) == ("refused", True)


def test_a_tower_runs_whole_and_raises_nothing():
    text = DECODER.replace("input_ids=None, ", "").replace("self.embed_tokens(input_ids)", "self.embed()")
    (site,) = sites(text)
    assert (site.status, site.part, site.edits) == (Status.REFUSED, "tower", ())
    assert "runs at full length on every rank" in site.reason


def test_a_model_whose_layers_are_in_another_class_is_refused():
    stack = (
        "\n\nclass OuterModel(PreTrainedModel):\n    def __init__(self, config):\n"
        "        self.encoder = TinyModel(config)\n\n"
        "    def forward(self, input_ids=None):\n"
        "        mask = create_causal_mask(input_ids)\n        return self.encoder(self.embed(input_ids), mask)\n"
    )
    inner = DECODER.replace("input_ids=None, ", "").replace("self.embed_tokens(input_ids)", "self.embed()")
    outer = next(site for site in sites(inner + stack) if site.target == "OuterModel.forward")
    assert (outer.status, outer.part) == (Status.REFUSED, "base_model") and "TinyModel" in outer.reason
    assert len(calls(spliced(inner + stack, [outer]))) == 1


@dataclass(frozen=True)
class Loop:
    """What a site says of a loop."""

    status: Status
    part: str
    reason: str


def installed_loops():
    """The loops of every modeling module of the installed release, with their families."""
    found = []
    gc.disable()  # trees have no cycles, and collections take almost half of the time
    try:
        for path in sorted(MODELS.glob("*/modeling_*.py")):
            text = path.read_text(encoding="utf-8")
            if "self." in text and "for " in text and "import torch" in text:
                view = ModuleView(Document(text, f"transformers.models.{path.parent.name}.{path.stem}"))
                loops = [Loop(site.status, site.part, site.reason) for site in idiom.find(view)]
                found += [(path.parent.name, loop) for loop in loops]
    finally:
        gc.enable()
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return once(tmp_path_factory, "layer_loops", installed_loops)


class TestTheInstalledRelease:
    def test_every_file_with_a_mask_and_a_loop_is_supported_or_refused_with_a_reason(self, rows):
        known = {family for family, _ in rows}
        generating = []
        for path in MODELS.glob("*/modeling_*.py"):
            text = path.read_text(encoding="utf-8")
            if (
                re.search(r"class \w+For(CausalLM|ConditionalGeneration)\b", text)
                and re.search(r"\bcreate_\w*mask\w*\(", text)
                and re.search(r"for .* in .*self\.layers", text)
            ):
                generating.append(path.parent.name)
        assert len(generating) > 100 and {*generating} <= known
        assert all(site.reason for _, site in rows if site.status is not Status.ROUTED)
        assert {site.status for _, site in rows} == {Status.ROUTED, Status.REFUSED}

    def test_the_number_of_supported_models(self, rows):
        supported = {family for family, site in rows if site.status is Status.ROUTED}
        assert {*FAMILIES, "mistral", "qwen2", "gemma2"} <= supported
        assert transformers.__version__ != "5.23.0" or LINEAR <= supported
        least = SUPPORTED.get(transformers.__version__)
        assert (
            least is None
            or sum(site.status is Status.ROUTED for _, site in rows if site.part == "base_model") >= least
        )

    @pytest.mark.parametrize(
        ("family", "kind"),
        [
            ("mamba2", "recurrent layers"),
            ("jamba", "recurrent layers"),
            ("bamba", "recurrent layers"),
            ("falcon_h1", "recurrent layers"),
            ("recurrent_gemma", "recurrent layers"),
            ("mistral_large4", "attention to positions that an indexer chooses"),
            ("lfm2", "convolutions along the positions"),
            ("granite4_vision", "deepstack"),
            ("gemma3n", "per-layer inputs"),
            ("t5", "cross attention"),
            ("bert", "apart from its mask"),
        ],
    )
    def test_families_that_are_refused_by_name(self, rows, family, kind):
        if not (MODELS / family).is_dir():
            pytest.skip(f"this release has no {family}")
        found = [site for name, site in rows if name == family and site.part == "base_model"]
        assert found and all(site.status is Status.REFUSED for site in found)
        assert any(kind in site.reason for site in found)


def test_coverage_counts_refusals_in_a_column_of_their_own():
    rows = examine(ORIGIN.module, DECODER, optional=(LAYER_LOOPS,))
    rows += examine(ORIGIN.module, changed(*mlp("x = x.cumsum(1)")), optional=(LAYER_LOOPS,))
    total = next(total for total in totals(rows) if total.op == "layer_loop")
    assert (total.candidates, total.routed, total.refused, total.missed) == (2, 1, 1, 0)
    assert "layer_loop" not in {row.op for row in examine(ORIGIN.module, DECODER)}


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["", "others"])
def test_the_layers_of_six_families_work_on_each_position_by_itself(broken, tmp_path):
    """With attention that does not mix positions, parts of the positions give parts of the result."""
    script = Path(__file__).with_name("facts_of_layer_loops.py")
    facts = facts_of(started(script, *FAMILIES, broken, cache=tmp_path, VEOMNI_PARALLEL="sp=2"))
    assert {*facts} == {*FAMILIES}
    for family, (error, cut, joined) in facts.items():
        assert (cut, joined) == (3, 3), family
        assert (error > 1e-2) if broken else (error < 1e-5), (family, error)
