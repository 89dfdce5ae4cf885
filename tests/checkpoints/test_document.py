"""What docs/checkpoints.md names exists; its example runs with those of the other documents."""

import subprocess
import sys
from pathlib import Path

import pytest

from veomni_hook import checkpoints

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_page_and_resolves():
    assert set(dir(checkpoints)) >= set(checkpoints.__all__)
    for name in checkpoints.__all__:
        assert getattr(checkpoints, name) is not None
        assert name in PAGE or name == "TensorConverter"
    with pytest.raises(AttributeError, match="no attribute 'from_nothing'"):
        checkpoints.from_nothing  # noqa: B018


def test_importing_the_room_loads_no_torch():
    code = "import sys; sys.path.insert(0, '.'); import veomni_hook.checkpoints{}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    for more, loaded in (("", "set()"), (".converter", "{'torch'}")):
        done = subprocess.run(
            [sys.executable, "-I", "-c", code.format(more)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert done.stdout.strip() == loaded
