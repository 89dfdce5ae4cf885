import ast
import importlib.util
import re
from collections.abc import Sequence

import pytest

from tests.patches.conftest import LOSS_TAIL
from tests.patches.upstream import modeling_files, source_of
from veomni_hook.errors import PatchError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin, PatchedSource, patch_source
from veomni_hook.patches.render import dump_text, header, unified_diff, with_header
from veomni_hook.patches.report import AppliedPatch, MissedSite, PatchReport, YieldedPatch
from veomni_hook.patches.spec import PatchConfig, SlotSpec

MODULE = "pkg.models.fam.modeling_fam"

IMPORTS = [
    # as written, and as dumped
    ("from . import x", "from pkg.models.fam import x"),
    ("from ... import x, y as z", "from pkg import x, y as z"),
    ("from .a import x", "from pkg.models.fam.a import x"),
    ("from  .  a . b  import x", "from  pkg.models.fam.a.b  import x"),
    ("from . . a import x", "from pkg.models.a import x"),
    ("from.import x", "from pkg.models.fam import x"),
    ("from .import(x)", "from pkg.models.fam import(x)"),
    ("from ...a import (\n    x,  # from . import y\n    y,\n)", "from pkg.a import (\n    x,  # from . import y\n    y,\n)"),
    ("from . \\\n    import x", "from pkg.models.fam \\\n    import x"),
    ("from \\\n    .a import x", "from \\\n    pkg.models.fam.a import x"),
    ("from .. \\\n.\\\na.b import x", "from pkg.a.b \\\n \\\n import x"),
    ("from .imports import x", "from pkg.models.fam.imports import x"),
    ("'ü'; from .a import x; from .. import y", "'ü'; from pkg.models.fam.a import x; from pkg.models import y"),
    ("def f():\n    from .a import x", "def f():\n    from pkg.models.fam.a import x"),
    (
        "if a:\n\tfrom .a import x\nelse:\n\tfrom .b import x",
        "if a:\n\tfrom pkg.models.fam.a import x\nelse:\n\tfrom pkg.models.fam.b import x",
    ),
    # other imports stay
    ("s = 'from . import x'  # from . import y", "s = 'from . import x'  # from . import y"),
    ("def f():\n    '''\n    from .a import x\n    '''", "def f():\n    '''\n    from .a import x\n    '''"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "dumped"), IMPORTS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_relative_imports_become_absolute(text, dumped, newline):
    text, dumped = (newline.join(form.split("\n")) for form in (text, dumped))
    result = dump_text(text, MODULE)
    # Blanks in a joined line may differ; only the tree and the lines count.
    assert re.sub(r"\\(\r?\n) +", r"\\\1 ", result) == re.sub(r"\\(\r?\n) +", r"\\\1 ", dumped)
    assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(dumped))
    assert len(result.splitlines()) == len(text.splitlines())


def test_an_import_beyond_the_package_is_an_error():
    assert dump_text("from .. import x", "a.b.c") == "from a import x"
    for module in ("a.b", "a"):
        with pytest.raises(PatchError, match="line 2 reaches beyond") as caught:
            dump_text("\nfrom .. import x", module)
        assert caught.value.where == module


def check_dump(path):
    text = path.read_text(encoding="utf-8")
    module = f"transformers.models.{path.parent.name}.{path.stem}"
    dumped = dump_text(text, module)
    before, after = text.split("\n"), dumped.split("\n")
    assert len(before) == len(after), path
    imports: Sequence[ast.ImportFrom] = [
        n for n in ast.walk(ast.parse(dumped)) if isinstance(n, ast.ImportFrom)
    ]
    assert not any(node.level for node in imports), path
    changed = {number for number, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b}
    relative = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.level]
    assert changed == {node.lineno for node in relative}, path
    # Python's own resolution is the oracle.
    package = module.rpartition(".")[0]
    wanted = [
        importlib.util.resolve_name("." * n.level + (n.module or ""), package).rstrip(".") for n in relative
    ]
    found = [n.module for n in imports if n.lineno in changed]
    assert sorted(found) == sorted(wanted), path
    return len(relative)


def test_dumps_of_installed_modules_keep_their_lines():
    files = modeling_files()
    assert sum(check_dump(path) for path in files[:: max(1, len(files) // 25)]) > 100


@pytest.mark.slow
def test_dumps_of_all_installed_modules_keep_their_lines():
    files = modeling_files()
    assert len(files) > 300
    assert sum(check_dump(path) for path in files) > 3000


REPORT = PatchReport(
    module=MODULE,
    version="1.2.3",
    distribution="dist",
    applied=(
        AppliedPatch("guard", "A.f", "Fast\n@deco.", "conf:c", lines=(1, 2)),
        AppliedPatch("helper", "h", "H.", "conf:d", lines=(3, 3)),
    ),
    yielded=(YieldedPatch("rewrite", "B.g", "user:c patches it", "built:in"),),
    slots=(SlotSpec("slot", "rms_norm", "weight"),),
)


def test_the_header_names_everything_that_was_done():
    text = "\n".join(header(REPORT, "abc123"))
    assert f"{MODULE} (dist 1.2.3)" in text
    assert "Patch hash: abc123" in text
    assert f"veomni-hook diff {MODULE}" in text
    assert (
        "# Patches applied: 2\n#   - [guard] A.f: Fast deco. (conf:c)\n#   - [helper] h: H. (conf:d)\n"
        in text
    )
    assert "gave way: 1\n#   - [rewrite] B.g: user:c patches it (built:in)\n" in text


def test_the_header_is_comments_only_and_leaves_the_rest_out_if_there_is_none():
    lines = header(PatchReport(MODULE, "1"), "x")
    assert all(line.startswith("#") and line == line.rstrip() and line.isprintable() for line in lines)
    assert not any("gave way" in line for line in lines)
    # Nothing in the first two lines may look like an encoding declaration (PEP 263).
    assert not any(re.match(r"^[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]+)", line) for line in lines[:2])


def route(op, target):
    return AppliedPatch("route", target, f"{op}/v: eps=self.eps", "idioms", lines=(1, 2), op=op, variant="v")


def test_routes_are_listed_by_formula():
    norms = [route("rms_norm", f"Model{number}RMSNorm.forward") for number in range(10)]
    slots = [
        AppliedPatch("slot", f"veomni_{op}_v", "a slot", "idioms", lines=(1, 1))
        for op in ("rms_norm", "rotary")
    ]
    report = PatchReport(
        MODULE,
        "1",
        applied=(*norms, route("rotary", "A.forward"), route("rotary", "A.forward"), *slots),
        missed=(MissedSite("rotary", "apply", "missed", "half_split: expected +,\nfound -"),),
        yielded=(YieldedPatch("route", "B.forward", "user of B", "idioms", "rotary", "v"),),
    )
    lines = header(report, "x")
    assert all(line.startswith("#") and len(line) <= 110 for line in lines)
    at = lines.index("# Routed to kernel slots: 12")
    listed = " ".join(line.removeprefix("#").strip() for line in lines[at + 1 :])
    names = ", ".join(patch.target for patch in norms)
    assert listed.startswith(f"- rms_norm/v: {names} - rotary/v: A.forward Built-in patches that gave way: 1")
    assert "- [route] B.forward: rotary/v: user of B" in listed
    assert listed.rstrip().endswith("kernel's code: 1 - rotary apply: half_split: expected +, found -")
    assert not any("slot]" in line or "Patches applied" in line for line in lines)
    assert len(lines) - at < 12


def patched(text, plain):
    return PatchedSource(text, plain, REPORT)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_stored_text_is_header_and_text(newline):
    text = f'"""Doc."""{newline}from __future__ import annotations{newline}x = 1'
    stored = with_header(patched(text, text), "abc")
    assert stored.endswith(text)
    above = stored.removesuffix(text)
    assert above == "".join(f"{line}{newline}" for line in header(REPORT, "abc"))
    tree = ast.parse(stored)
    assert ast.get_docstring(tree) == "Doc."
    assert tree.body[2].lineno == len(header(REPORT, "abc")) + 3
    assert with_header(patched("x = 1", "x = 1"), "abc").endswith("#\nx = 1")


def test_the_diff_is_unified_and_labelled():
    original = "a\nb\nc\nd\n"
    assert unified_diff(original, patched("# M\na\nb\nX\nd\n", "a\nb\nX\nd\n"), MODULE) == (
        f"--- {MODULE} (dist 1.2.3)\n+++ {MODULE} (patched by veomni-hook)\n"
        "@@ -1,4 +1,4 @@\n a\n b\n-c\n+X\n d\n"
    )
    assert unified_diff(original, patched("# M\n" + original, original), MODULE) == ""


def test_the_diff_knows_texts_without_a_last_newline_and_odd_line_ends():
    diff = unified_diff("a\nb", patched("", "a\nb\n"), MODULE)
    assert diff.endswith("-b\n\\ No newline at end of file\n+b\n")
    diff = unified_diff("a\x0cb\r\nc\u2028d\r\n", patched("", "a\x0cb\r\nc\u2028e\r\n"), MODULE)
    assert diff.endswith("@@ -1,2 +1,2 @@\n a\x0cb\r\n-c\u2028d\r\n+c\u2028e\r\n")


slot: object = None


def guard_norm(self, hidden_states):
    # asks the slot
    kernel = slot.kernel(self, hidden_states)
    if kernel is not None:
        return kernel(hidden_states, self.weight, self.variance_epsilon)


def guard_loss(self, labels, hidden, loss_kwargs, output, fields):
    fused = slot.kernel(self, labels)
    if fused is not None:
        value, late = fused(self.lm_head, hidden, labels, **loss_kwargs)
        return output(loss=value, logits=late, **fields)


QWEN3 = "transformers.models.qwen3.modeling_qwen3"


def qwen3_patched(source):
    document = Document(source, QWEN3)

    def digest(name: str) -> str:
        return fingerprint(document.find(name)[0].node)

    config = PatchConfig(QWEN3)
    config.add_slot("slot", op="rms_norm", variant="weight")
    config.insert_guard("Qwen3RMSNorm.forward", guard_norm, fingerprints=[digest("Qwen3RMSNorm.forward")])
    config.insert_guard("Qwen3ForCausalLM.forward", guard_loss, before=LOSS_TAIL, fingerprints=())
    config.rewrite(
        "Qwen3Attention.forward",
        pattern="apply_rotary_pos_emb({q}, {k}, {cos}, {sin})",
        replacement="(slot.kernel(self, {q}) or apply_rotary_pos_emb)({q}, {k}, {cos}, {sin})",
        relies_on={
            "rotate_half": digest("rotate_half"),
            "apply_rotary_pos_emb": digest("apply_rotary_pos_emb"),
        },
    )
    return patch_source(source, [config], Origin(QWEN3, "modeling_qwen3.py", "transformers", "0"))


def shaped_lines(found):
    """Numbers of the lines of ``plain`` that the report attributes to applied patches."""
    plain = found.plain.split("\n")
    numbers: set[int] = set()
    position = 0
    for number, line in enumerate(found.text.split("\n"), 1):
        if position < len(plain) and line == plain[position]:
            position += 1
            if any(patch.lines[0] <= number <= patch.lines[1] for patch in found.report.applied):
                numbers.add(position)
        else:
            assert line.lstrip().startswith("# ["), line  # only markers are missing from plain
    assert position == len(plain)
    return numbers


def test_every_hunk_belongs_to_an_applied_patch():
    source = source_of("qwen3")
    found = qwen3_patched(source)
    shaped = shaped_lines(found)
    diff = unified_diff(source, found, QWEN3)
    hunks = 0
    number = 0
    for line in diff.splitlines()[2:]:
        if line.startswith("@@"):
            hunks += 1
            number = int(re.findall(r"\+(\d+)", line)[0])
        elif line.startswith("-"):
            assert {number - 1, number} & shaped, line
        else:
            # A diff may mark either of two equal adjacent lines (mostly blank ones) as new.
            near = {number - 1, number, number + 1} if line == "+" else {number}
            assert line.startswith(" ") or near & shaped, line
            number += 1
    assert hunks == len(found.report.applied) == 4
    assert "[PATCHED" not in diff and "[MODIFIED" not in diff
