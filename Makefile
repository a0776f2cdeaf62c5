# `make train` and `make test` do all the set-up that they need on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 3
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs-ready

# Tests start many processes. Without files of bytecode, each of them would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-rest test-all coverage lint docs docs-serve setup check-cuda check-trl check-verl check-tinker check-rl clean

train: setup  ## train a small Llama on 8 ranks, measure the planners, simulate 512 GPUs
	$(BIN)/bytescale demo

test: setup  ## every claim once (4 to 5 minutes on 2 cores)
	$(BIN)/pytest --numprocesses $(JOBS) --dist worksteal

test-rest: setup  ## what `make test` leaves out: exhaustive meshes, many examples, long runs; MINUTES=40 ends it in time
	$(BIN)/pytest --numprocesses $(JOBS) --dist worksteal --rest $(if $(MINUTES),--minutes $(MINUTES))

test-all: test test-rest  ## all of it (an hour on 2 cores)

coverage: setup  ## which lines `make test` runs, in all of its processes; a third slower, so it is a command of its own
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses $(JOBS) --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort cover

lint: setup  ## formatter, linter, types, and the layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DOCS)  ## the documentation site, in site/; broken links fail
	$(BIN)/mkdocs build --strict

docs-serve: $(DOCS)  ## the same on http://127.0.0.1:8000, built again when a page changes
	$(BIN)/mkdocs serve

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bytescale needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) --version). To fix: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plot,tensorboard,wandb,ray]'
	@touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

check-cuda:  ## GPU code against CUDA builds of torch, without a GPU: 6 GB of downloads the first time, then some minutes
	$(PYTHON) tests/cuda/run.py

check-trl:  ## TRL's trainers alone and over HDP, on one rank and on two: 3 GB of downloads the first time, then some minutes
	$(PYTHON) -m tests.trl.run

check-verl:  ## verl's worker and losses on our engine, on two ranks and on four: 6 GB of downloads the first time, then some minutes
	$(PYTHON) -m tests.verl.run

check-tinker:  ## Tinker's client against bytescale serve, on one rank and on two: 3 GB of downloads the first time, then some minutes
	$(PYTHON) -m tests.tinker.run

check-rl:  ## loops and losses of other projects on ours, on one rank and on two: 5 GB of downloads the first time, then some minutes
	$(PYTHON) -m tests.rl.run

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage* site
