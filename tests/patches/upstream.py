"""The modeling files of the installed release, read without an import of it."""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(find_spec("transformers").origin).parent
MODELS = ROOT / "models"


def modeling_files():
    return sorted(MODELS.glob("*/modeling_*.py"))


def modeling_file(family):
    return MODELS / family / f"modeling_{family}.py"


def source_of(family):
    return modeling_file(family).read_text("utf-8")
