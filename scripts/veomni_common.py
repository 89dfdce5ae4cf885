"""What the scripts about VeOmni share: its configs, the page of what came of them, and child processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "maintain" / "veomni-parity.md"

#: The release of transformers that VeOmni's configs are made for.
WRITTEN_FOR = "5.9.0"
ENDING = "_patch_gen_config"
_FOLDER = "models/transformers"
_WIDTH = 120
_SECONDS = 3600


def package(name: str) -> Path:
    """Return the folder of an installed package.

    Raises:
        SystemExit: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install --no-deps {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def config_names() -> list[str]:
    """Return the modules of all configs of the installed VeOmni, by the names of their files."""
    folder = package("veomni")
    files = sorted(folder.glob(f"{_FOLDER}/*/*{ENDING}.py"), key=lambda file: file.name)
    return [".".join(("veomni", *file.relative_to(folder).with_suffix("").parts)) for file in files]


def short(config: str) -> str:
    """Return the name of a config's module without what all of them have."""
    return config.partition(":")[0].rpartition(".")[2].removesuffix(ENDING)


def wrapped(*sentences: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph; empty sentences are left out."""
    return textwrap.wrap(
        " ".join(filter(None, sentences)),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def child(module: str, *arguments: str, **settings: str) -> str:
    """Run a module in a process with these settings of VEOMNI alone; return the last line that it prints.

    Raises:
        SystemExit: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    environment |= {f"VEOMNI_{name}": value for name, value in settings.items()}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1] if done.stdout else ""
