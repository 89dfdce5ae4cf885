"""The test suite over the supported transformers releases and beside VeOmni, `make matrix`; `make recipes`.

One of them: `nox -s "matrix(transformers='5.9.0')"`. Every release gets its own
environment, because the releases disagree on tokenizers and huggingface_hub.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

#: The release of VeOmni, and the release of transformers that its modules are generated from.
VEOMNI = ("0.1.12", "5.9.0")
RELEASES = ["5.2.0", "5.9.0", "5.17.0", "5.23.0"]
# Pinned for 5.23.0 in the constraints; each release brings its own.
RELEASE_BOUND = {"transformers", "tokenizers", "huggingface-hub", "hf-xet", "typer", "click"}

# What recipes need beside what development installs, pinned in constraints-recipes.txt.
RECIPE_PACKAGES = ["datasets", "ipykernel", "joblib", "nbclient", "ray[train]", "submitit", "trl"]

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["matrix"]


def shared_constraints(folder: Path) -> Path:
    """Write the development constraints without the release-bound pins to ``folder`` and return the file."""
    lines = Path("constraints-dev.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if re.sub(r"[_.]", "-", line.split("==")[0]).lower() not in RELEASE_BOUND]
    target = folder / "constraints.txt"
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return target


@nox.session
@nox.parametrize("transformers", RELEASES)
def matrix(session: nox.Session, transformers: str) -> None:
    """Run the suite against one transformers release; arguments after ``--`` go to pytest."""
    constraints = str(shared_constraints(Path(session.create_tmp())))
    # torch first and alone, as in the Makefile.
    session.install("--quiet", "-c", constraints, "torch")
    session.install("--quiet", "-c", constraints, "hatchling", "editables")
    session.install(
        "--quiet", "-c", constraints, "--no-build-isolation", f"transformers=={transformers}", "-e", ".[dev]"
    )
    session.run("veomni-hook", "check", env={"HF_HUB_OFFLINE": "1"})
    session.run(
        "python",
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        *session.posargs,
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


@nox.session
def veomni(session: nox.Session) -> None:
    """Run VeOmni's configs beside the modules that its wheel brings; arguments after ``--`` go to pytest."""
    constraints = str(shared_constraints(Path(session.create_tmp())))
    session.install("--quiet", "-c", constraints, "torch")
    session.install("--quiet", "-c", constraints, "hatchling", "editables")
    session.install(
        "--quiet", "-c", constraints, "--no-build-isolation", f"transformers=={VEOMNI[1]}", "-e", ".[dev]"
    )
    # Its requirements are those of training; its configs and modules need none of them but psutil.
    session.install("--quiet", "--no-deps", f"veomni=={VEOMNI[0]}")
    session.run(
        "python",
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadfile",  # the tests of a file share what its processes found
        "tests/veomni",
        "tests/integrations",
        *session.posargs,
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


@nox.session
def recipes(session: nox.Session) -> None:
    """Run every recipe without and with the hook; arguments after ``--`` go to pytest."""
    constraints = ("-c", "constraints-dev.txt", "-c", "constraints-recipes.txt")
    # torch first and alone, as in the Makefile.
    session.install("--quiet", "-c", "constraints-dev.txt", "torch")
    session.install("--quiet", "-c", "constraints-dev.txt", "hatchling", "editables")
    session.install("--quiet", *constraints, "--no-build-isolation", "-e", ".[dev]", *RECIPE_PACKAGES)
    # A package that is missing is a failure here, and a test that is skipped elsewhere.
    session.run(
        "python",
        "-m",
        "pytest",
        "tests/recipes",
        *session.posargs,
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RECIPES_SKIP": "0"},
    )
