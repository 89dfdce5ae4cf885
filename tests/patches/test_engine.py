import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patches.conftest import ORIGIN
from tests.patches.upstream import modeling_files
from veomni_hook.errors import ConfigError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin, applicable, patch_source
from veomni_hook.patches.report import PatchReport
from veomni_hook.patches.spec import PatchConfig

UPSTREAM = '''\
"""Doc."""
import os


class A:
    def m(self, x):
        return x

    def n(self):
        return 1


def f(q):
    return q


class B(A): ...


C: int = 1
'''
CODE = """
    config.add_import("json")
    config.exclude_from_output("C")

    # Patch.1
    @config.override_method("A.m", description="why")
    def m(self, x):
        return [x]

    @config.replace_function("f")
    def g(q):
        return {q}

    @config.add_method("B.new")
    def new(self):
        return 2
"""


def unpatched(path):
    source = path.read_bytes().decode()
    result = patch_source(source, [], Origin(f"m.{path.stem}", str(path), "transformers", "0"))
    assert result.text == result.plain == source
    report = result.report
    assert (report.applied, report.yielded, report.slots) == ((), (), ())
    named = {d.qualname for d in Document(source).definitions() if len(d.parents) == 1}
    assert set(report.untouched) == named


def test_sample_of_upstream_is_reproduced():
    families = ["qwen3/", "qwen3_vl/", "xlstm/", "auto/", "esmfold", "blip_text", "gemma3n/"]
    chosen = [path for path in modeling_files() if any(name in path.as_posix() for name in families)]
    assert len(chosen) >= 5
    for path in chosen:
        unpatched(path)


@pytest.mark.slow
def test_all_of_upstream_is_reproduced():
    files = modeling_files()
    assert len(files) > 300
    for path in files:
        unpatched(path)


@pytest.mark.slow
def test_every_definition_of_upstream_is_where_the_document_says():
    for path in modeling_files():
        document = Document(path.read_bytes().decode())
        for definition in document.definitions():
            text, indent = document.text(definition.node), document.indent(definition.node)
            again: Any = ast.parse(f"if 1:\n{indent}{text}" if indent else f"if 1:\n pass\n{text}").body
            first = again[0].body[0] if indent else again[1]
            assert ast.dump(first) == ast.dump(definition.node)


def test_report_tells_what_was_done_and_where(patched):
    result = patched(UPSTREAM, CODE)
    lines = result.text.splitlines()
    shown = {one.target: "\n".join(lines[one.lines[0] - 1 : one.lines[1]]) for one in result.report.applied}
    assert list(shown) == ["A.m", "f", "B.new", "C", "json"]
    assert shown["A.m"].splitlines()[0].startswith("    # [PATCHED METHOD] A.m: why (config_of_test_")
    assert shown["A.m"].endswith("# Patch.1\n    def m(self, x):\n        return [x]")
    assert shown["f"].endswith("def f(q):\n    return {q}")
    assert shown["B.new"].endswith("    def new(self):\n        return 2")
    assert shown["json"].endswith("from json import *")
    assert result.report.untouched == ()  # C is removed, the others are changed
    assert [one.kind for one in result.report.applied] == [
        "method_override",
        "function_replacement",
        "method_addition",
        "exclude",
        "additional_import",
    ]
    assert PatchReport.from_dict(result.report.to_dict()) == result.report


def test_markers_stand_in_text_only(patched):
    result = patched(UPSTREAM, CODE)
    for marker in (
        "# [PATCHED METHOD]",
        "# [PATCHED FUNCTION]",
        "# [MODIFIED CLASS] A: m",
        "# [MODIFIED CLASS] B: new",
    ):
        assert marker in result.text and marker not in result.plain
    unmarked = [line for line in result.text.splitlines() if not line.strip().startswith("# [")]
    assert unmarked == result.plain.splitlines()
    assert ast.dump(ast.parse(result.text)) == ast.dump(ast.parse(result.plain))


@given(st.sampled_from(["\n", "\r\n"]), st.booleans(), st.sampled_from(["    ", "\t", "  "]))
def test_forms_of_the_text(newline, finished, indent):
    source = UPSTREAM.replace("    ", indent).replace("\n", newline)
    source = source if finished else source.rstrip()
    config = PatchConfig("pkg.upstream")
    config.override_method("A.m", _override_m)
    config.add_method("B.new", _override_m)
    config.add_method("A.new", _override_m)
    config.add_helper(_helper)
    config.add_helper_after("B", _after)
    result = patch_source(source, [config], ORIGIN)
    namespace: dict[str, Any] = {}
    exec(compile(result.text, "m", "exec", dont_inherit=True), namespace)
    assert namespace["A"]().m(1) == namespace["B"]().new(1) == namespace["A"]().new(1) == (1, "two\n  lines")
    assert (namespace["_helper"](), namespace["_after"]()) == (1, 2)
    assert result.text.replace(newline, "").count("\n") == 0 or newline == "\n"
    assert result.text.endswith(newline) is finished


def _override_m(self, x):
    return (
        x,
        """two
  lines""",
    )


def _helper():
    return 1


def _after():
    return 2


def test_same_input_same_bytes_in_every_process(tmp_path):
    (tmp_path / "cfg.py").write_text(
        "from veomni_hook.patches.spec import PatchConfig\n"
        "config = PatchConfig('pkg.upstream')\n"
        "config.drop_import_names('a', 'b', 'c', 'd', 'e')\n"
        "@config.override_method('A.m')\ndef m(self): return 1\n"
    )
    code = (
        "import sys, cfg\n"
        "from veomni_hook.patches.engine import *\n"
        "source = 'from x import a, b, c, d, e, f\\nclass A:\\n    def m(self): pass\\n'\n"
        "made = patch_source(source, [cfg.config], Origin('pkg.upstream', 'p', 'd', '1'))\n"
        "print(made.text, made.report)\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'transformers')])\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().endswith("[]\n")


def test_configs_for_other_modules_and_devices():
    mine, other, npu = (
        PatchConfig("pkg.upstream"),
        PatchConfig("pkg.other"),
        PatchConfig("pkg.upstream", device="npu"),
    )
    assert applicable([other, mine, npu, mine], "pkg.upstream", "gpu") == [mine]
    assert applicable([other, mine, npu], "pkg.upstream", "npu") == [mine, npu]
    for wrong in (other, npu):
        with pytest.raises(ConfigError, match=wrong.source_module):
            patch_source("", [wrong], ORIGIN)
