"""Compares all dumps of two commits: `python -m scripts.dumps OLD [NEW]`.

Both commits dump every modeling module of transformers, as `veomni-hook dump` prints it, and list every site
with its reason, as `veomni-hook list --by site` does. The script prints the diffs of what is not equal byte
for byte, and fails if there are any. Without NEW, the second side is the working tree. It is the proof of a
change that claims to leave behaviour as it is.

The environment chooses the rest: PYTHONPATH another release of transformers (an unpacked wheel),
VEOMNI_PARALLEL and VEOMNI_SPEECH what the text depends on.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The file of the sites, beside one for each module.
SITES = "sites.json"
#: Modules that all models share and that built-in patches are for.
SHARED = (
    "activations", "modeling_layers", "modeling_utils", "configuration_utils", "masking_utils",
    "dynamic_module_utils", "integrations.sdpa_attention",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two commits; return 1 if a dump differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", metavar="OLD", help="a commit")
    parser.add_argument("new", metavar="NEW", nargs="?", help="a commit (default: the working tree)")
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="keep OLD's side in this folder, or take it from there"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    modules = installed_modules()
    files = [*(f"{module}.py" for module in modules), SITES]
    with tempfile.TemporaryDirectory() as folder:
        before, after = chosen.keep or Path(folder, "old"), Path(folder, "new")
        for commit, side in ((chosen.old, before), (chosen.new, after)):
            if not Path(side, SITES).exists():
                with tree(commit) as root:
                    dump_all(modules, root, side, chosen.jobs)
        differing = 0
        total = hashlib.sha256()
        for file in files:
            texts = [Path(side, file).read_bytes() for side in (before, after)]
            total.update(texts[1])
            if texts[0] != texts[1]:
                differing += 1
                lines = [text.decode().splitlines(keepends=True) for text in texts]
                sys.stdout.writelines(difflib.unified_diff(*lines, f"{file} (old)", f"{file} (new)"))
    print(f"{len(modules)} modules and all sites: {len(files) - differing} equal files, {differing} differ")
    print(f"SHA-256 of all: {total.hexdigest()}")
    return int(bool(differing))


def installed_modules() -> list[str]:
    """Every module of the installed transformers that can be patched; nothing is imported."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SystemExit("transformers is not installed")
    package = Path(spec.origin).parent
    files = package.glob("models/*/modeling_*.py")
    names = [".".join(("transformers", *path.relative_to(package).with_suffix("").parts)) for path in files]
    return sorted(names) + [f"transformers.{name}" for name in SHARED]


@contextlib.contextmanager
def tree(commit: str | None) -> Iterator[Path]:
    """The files of a commit in a folder that exists as long as the context; None: the working tree."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def dump_all(modules: Sequence[str], root: Path, folder: Path, jobs: int) -> None:
    """Write a file for each module, and one for all sites, with the package in ``root``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(jobs) as pool:
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "VEOMNI_CACHE_DIR": cache}

        def dump(share: Sequence[str]) -> None:
            # -P: without the folder of this file, whose tree may be the other one
            command = [sys.executable, "-P", __file__, "--dump", *share]
            subprocess.run(command, env=environment, cwd=folder, check=True)

        list(pool.map(dump, (modules[start::jobs] for start in range(jobs))))
        listing = f"-P -m veomni_hook list --by site --json --output {SITES}".split()
        subprocess.run([sys.executable, *listing], env=environment, cwd=folder, check=True)


def dump_here(modules: Sequence[str]) -> None:
    """Dump modules into the working directory by the command itself, because its internals may differ."""
    for module in modules:
        sys.argv = ["veomni-hook", "dump", module, "--output", f"{module}.py"]
        with contextlib.redirect_stderr(None):
            try:
                runpy.run_module("veomni_hook", run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise SystemExit(f"{module} cannot be dumped") from end


if __name__ == "__main__":
    if sys.argv[1:2] == ["--dump"]:
        dump_here(sys.argv[2:])
    else:
        sys.exit(main())
