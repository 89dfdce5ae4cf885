"""The modeling files of the installed release, read without an import of it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

ROOT = Path(find_spec("transformers").origin).parent
MODELS = ROOT / "models"

#: What needs layers that upstream hands the boundaries of samples to.
HANDED = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.9"), reason="no layer of this release takes boundaries"
)


def modeling_files():
    return sorted(MODELS.glob("*/modeling_*.py"))


def modeling_file(family):
    return MODELS / family / f"modeling_{family}.py"


def source_of(family):
    return modeling_file(family).read_text("utf-8")
