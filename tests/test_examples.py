"""The example is an ordinary script: it knows nothing of this package, and it trains."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train.py"


def test_the_script_knows_nothing_of_us():
    text = SCRIPT.read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "transformers" in imported
    assert "veomni" not in text.lower()
    assert imported - {"transformers", "__future__"} <= set(sys.stdlib_module_names)


def test_it_trains_offline_with_one_added_line(tmp_path):
    # The other way to start the hook: one import in front of the script, here on a copy.
    script = tmp_path / "train.py"
    text = SCRIPT.read_text(encoding="utf-8")
    script.write_text(
        text.replace("import argparse\n", "import veomni_hook.install\nimport argparse\n", 1), "utf-8"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    subprocess.run(
        [
            sys.executable,
            str(script),
            "--steps",
            "3",
            "--layers",
            "2",
            "--output",
            str(tmp_path / "out.json"),
        ],
        cwd=tmp_path,
        env={
            **environment,
            "PYTHONPATH": str(SCRIPT.parents[1]),
            "HF_HUB_OFFLINE": "1",
            "VEOMNI_CACHE_DIR": str(tmp_path / "cache"),
            "VEOMNI_DUMP_PATCHED": "1",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert len(found["losses"]) == len(found["step_seconds"]) == 3
    assert found["losses"][0] > found["losses"][-1]
    dumped = tmp_path / "veomni_patched" / "models" / "qwen3"
    ast.parse((dumped / "modeling_qwen3.py").read_text(encoding="utf-8"))
    assert (dumped / "modeling_qwen3.diff").read_text(encoding="utf-8").startswith("--- ")
