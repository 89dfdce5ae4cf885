"""Builds the patched Qwen3 module beside the installed one, without the import hook.

The text is written where the hook would store it (transformers reads the model's name from the path) and run
under a name of its own inside the upstream package, so that its relative imports work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.models.qwen3 import config

UPSTREAM = "transformers.models.qwen3.modeling_qwen3"
NAME = "transformers.models.qwen3.modeling_qwen3_with_slots"


def load(folder: Path) -> ModuleType:
    """Return the patched module, whose source is written below ``folder``."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    upstream = importlib.util.find_spec(UPSTREAM)
    version = importlib.metadata.version("transformers")
    origin = Origin(UPSTREAM, upstream.origin, "transformers", version)
    patched = patch_source(Path(upstream.origin).read_text(encoding="utf-8"), [config], origin)
    path = folder / "models" / "qwen3" / "modeling_qwen3.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(patched.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module
