from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from tests.tools.report.structure import Page
from veomni_hook.patches.reasons import Code
from veomni_hook.patches.report import AppliedPatch
from veomni_hook.patches.spec import SlotSpec
from veomni_hook.tools.cli.app import app
from veomni_hook.tools.cli.inputs.targets import transformers_folder
from veomni_hook.tools.report.explanation import explain
from veomni_hook.tools.report.gather import _changes, places_in

QWEN3 = "module-qwen3"


def rows(text: str, caption: str) -> list[list[str]]:
    """The cells of the table with a caption, as text."""
    found = re.search(rf"<caption>{re.escape(caption)}.*?</table>", text, re.DOTALL)
    assert found, caption
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found[0].split("</tr>"))
    return [
        [" ".join(unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in row] for row in cells if row
    ]


def side(text: str, names: tuple[str, str]) -> list[str]:
    """The lines of one side of the first diff, by the classes of its numbers."""
    diff = text[text.index('class="diff"') :]
    diff = diff[: diff.index("</section>")]
    number, own = names
    found = re.findall(
        rf'<td class="n {own}"[^>]*>[^<]*(?:<b>[^<]*</b>)?</td><td class="c[^"]*">(.*?)</td>', diff
    )
    assert found, number
    return [unescape(re.sub(r"<[^>]+>", "", line)) for line in found]


@pytest.mark.parametrize("kind", ["written", "live"])
def test_pages_are_well_formed_whole_and_safe(kind: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(kind).read_text(encoding="utf-8")
    found = Page(text)
    assert found.tags["script"] == 0 and "default-src 'none'" in text
    assert not re.findall(r"url\(|@import|https?://", text[: text.index("</style>")])
    assert "</script><b onclick='x()'>bold</b> & \"more\" \\u202e" in found.text
    assert "</td></table><script>document.title = 'taken'</script><!-- &amp; -->" in found.text
    assert str(Path.home()) not in text and transformers_folder() not in text


@pytest.mark.parametrize("kind", ["written", "live"])
def test_both_sides_are_the_whole_sources(kind: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(kind).read_text(encoding="utf-8")
    installed = Path(transformers_folder(), "models", "qwen3", "modeling_qwen3.py").read_text(
        encoding="utf-8"
    )
    assert side(text, ("left", "l")) == installed.splitlines()
    patched = side(text, ("right", "r"))
    assert len(patched) > len(side(text, ("left", "l")))
    compile("\n".join(patched), "patched", "exec")
    numbers = [int(number) for number in re.findall(r'id="module-qwen3(?:-live)?-line-(\d+)"', text)]
    assert numbers == [*range(numbers[0], numbers[0] + len(patched))]


def test_every_place_leads_to_its_lines_and_has_its_kernel(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    found = {row[0].split(",")[0]: row for row in rows(text, "Every patch of qwen3;")}
    norm = found["Qwen3RMSNorm.forward"]
    assert "rms_norm/cast_before_weight" in norm[1] and norm[2].split() == ["triton"]
    assert norm[3].startswith("can run here") and "eager : the fallback" in norm[3]
    own = found["Qwen3RMSNorm.extra_repr"]
    assert own[1].split()[:2] == ["method", "replaced"] and "bold" in own[1] and own[2:] == ["", ""]
    line = re.search(rf'href="#{QWEN3}-line-(\d+)"[^>]*>Qwen3RMSNorm.forward', text)
    row = re.search(rf'id="{QWEN3}-line-{line[1]}".*?</tr>', text)
    assert "# [ROUTED] rms_norm/cast_before_weight" in row[0]


def test_a_note_stands_above_the_lines_of_each_patch(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    note = re.search(
        r'<tbody class="note">(?:(?!</tbody>).)*Qwen3RMSNorm\.extra_repr.*?</tbody>(.*?)</tr>', text
    )
    assert note and "Qwen3RMSNorm.extra_repr" in unescape(note[1])
    assert "declared by hostile_config" in note[0]
    assert text.count('<tbody class="note">') >= len(rows(text, "Every patch of qwen3;")) - 1


def test_what_is_not_patched_says_why(written: Path) -> None:
    text = Page(written.read_text(encoding="utf-8")).text
    assert "Upstream's code runs unchanged: no patch applies." in text
    assert "No place of this module looks like one of the ops." in text
    missed = {row[0]: row[1:] for row in rows(written.read_text(encoding="utf-8"), "Places that look like")}
    assert missed["DbrxExperts.forward"] == [
        "moe_experts",
        "not recognised",
        "nearest is gated: no loop over experts",
        "other_form",
    ]
    told = rows(written.read_text(encoding="utf-8"), "What can be done")
    assert ["other_form", Code.OTHER_FORM.remedy] in told
    yielded = {row[0]: row[2] for row in rows(written.read_text(encoding="utf-8"), "Patches that gave way")}
    assert "relies on upstream's Qwen3RMSNorm" in yielded["Qwen3DecoderLayer.forward"]


def test_benchmarks_of_a_checkout_are_bars(
    written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = written.read_text(encoding="utf-8")
    assert rows(text, "A training step of Qwen3-8B")[1:][0][0] == "upstream"
    widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', text)]
    assert widths and max(widths) == 100 and min(widths) > 0
    assert text.index("NVIDIA") < text.index("CPUs, Linux")  # this machine's kind first
    said = Page(text).text
    assert "Time, recorded232 ms300 ms without the hook." in said
    assert "Memory, recorded9.67 GiB41.47 GiB without the hook" in said
    monkeypatch.setattr(
        "veomni_hook.tools.report.benchmarks.__file__", str(tmp_path / "a" / "b" / "benchmarks.py")
    )
    done = CliRunner().invoke(app, ["report", "clvp", "--system", "cpu", "-o", "-"])
    assert done.exit_code == 0 and not re.search("Benchmarks|recorded", Page(done.stdout).text)
    assert ["rotary", "no kernel exists"] in [row[1:3] for row in rows(done.stdout, "Places that look like")]


def test_the_first_figures_say_what_is_fused(written: Path, live: Path) -> None:
    said = Page(written.read_text(encoding="utf-8")).text
    assert "Fused8 placesrms_norm, gated_mlp, rotary, linear_cross_entropy, load_balancing_loss" in said
    said = Page(live.read_text(encoding="utf-8")).text
    assert "Ran fused2 placesrms_norm, rotaryUpstream's code2 placesgated_mlp, linear_cross_entropy" in said


def test_what_ran_in_a_model(live: Path) -> None:
    text = live.read_text(encoding="utf-8")
    found = {
        (row[0].split(",")[0], row[1].split()[0]): row for row in rows(text, "Every patch of qwen3_live;")
    }
    norm = found["Qwen3RMSNorm.forward", "rms_norm/cast_before_weight"]
    assert norm[2:] == [
        "torch Qwen3RMSNorm x9",
        "picked by auto",
        "9 calls in training; 9 calls in evaluation",
    ]
    loss = found["Qwen3ForCausalLM.forward", "linear_cross_entropy/next_token"]
    assert loss[2:] == [
        "eager (upstream's code) Qwen3ForCausalLM x1",
        "the model is in eval mode, where callers read the logits",
        "in training: eager (with so few logits, upstream's code is as fast) 1 call; 1 call in evaluation",
    ]
    assert "Qwen3ForCausalLM: patches, and what ran" in Page(text).text


COPIED = """
class Layer:
    def forward(self, x):
        if NORM.fuses(self):
            return veomni_Layer_forward(self, x)
        return ROTARY.at(self, turn)(x)

def veomni_Layer_forward(self, x):
    if (kernel := NORM.kernel(self, x)) is not None:
        return kernel(x)
    return ROTARY.at(self, turn)(x)
"""


def test_places_in_the_copy_of_a_method_belong_to_the_method() -> None:
    slots = [SlotSpec("NORM", "rms_norm", "unweighted"), SlotSpec("ROTARY", "rotary", "half_split")]
    found = places_in(COPIED, slots)
    assert [(place.target, place.slot) for place in found] == [
        ("Layer.forward", "ROTARY"), ("Layer.forward", "NORM"), ("Layer.forward", "ROTARY")
    ]  # fmt: skip
    patch = AppliedPatch("route", "Layer.forward", "", "c", lines=(1, 99), op="rotary", variant="half_split")
    (change,) = _changes([patch], found)
    assert [place.slot for place in change.places] == ["ROTARY", "NORM"], (
        "asked by the method and by its copy"
    )


def test_wrong_use(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["report", *arguments])
        assert (done.exit_code, done.stdout) == (2, "")
        return done.stderr

    assert "no target" in refused()
    assert "nearest names: qwen3" in refused("qwne3")
    assert "there is no system 'sm9'" in refused("qwen3", "--system", "sm9")
    assert "the page cannot be written" in refused(
        "auto", "--system", "cpu", "-o", str(tmp_path / "no" / "x.html")
    )
    assert "stdout cannot be opened" in refused("auto", "-o", "-", "--open")


def test_models_that_are_not_patched_say_so() -> None:
    plain = Page(explain(nn.Linear(2, 2)).to_html())
    assert "there is nothing to patch" in plain.text and plain.tags["section"] == 0
    other = type("Other", (nn.Module,), {"__module__": "somewhere.modeling_other"})()
    text = Page(explain(other).to_html()).text
    assert "Upstream's code runs unchanged: the hook did not load it." in text and "Not routed" not in text


def test_one_config_alone_says_nothing_of_candidates(settings: None) -> None:
    done = CliRunner().invoke(app, ["report", "--config", "hostile_config", "--system", "cpu", "-o", "-"])
    found = Page(done.stdout)
    assert done.exit_code == 0 and "module-qwen3-places" in found.ids
    assert "module-qwen3-unrouted" not in found.ids
