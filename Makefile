# `make train` and `make test` work from a bare clone: `setup` makes .venv, and only what of it is out of date.

NP ?= 2
VENV ?= .venv
python = $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup ready ready-to-train train bench overhead test test-slow test-matrix test-all test-versions wheel docs image image-check format lint clean

# What they said once, set-up remembers.
export TENSORFLOW PYTHON GPU VENV FOR

help:  ## List the targets
	@echo 'make TARGET [NAME=value ...]'
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 16
	@echo
	@echo '  TENSORFLOW=2.15     the TensorFlow for .venv (else the newest, 2.21 on Python 3.10 to 3.13)'
	@echo '  PYTHON=python3.10   the interpreter for .venv (else the newest that is found and has the TensorFlow; else one is fetched)'
	@echo '  VENV=.venvs/3.10    another environment than .venv'
	@echo '  GPU=1               TensorFlow with CUDA, CuPy, and Horovod with NCCL (needs the CUDA 12 toolkit)'
	@echo '  NP=2                train, bench: how many ranks'
	@echo '  ARGS="..."          train, bench, overhead: the program'"'"'s arguments; test, test-all: pytest'"'"'s'

setup:  ## Make .venv: pinned packages, this package, Horovod built against TensorFlow (3 to 8 minutes, once)
	@tools/setup.sh

ready:
	@tools/setup.sh --quiet

ready-to-train:  # Ranks of one host need no Horovod: the first result doesn't wait for its build.
	@tools/setup.sh --without-horovod

train: ready-to-train  ## Train on the census data, its embedding tables sharded over NP ranks
	$(python) -m collective.launch -np $(NP) modelzoo/census_income/train.py $(ARGS)

bench: ready  ## Time a training step on NP ranks, and for comparison plain TensorFlow, the bare exchange and replicated tables
	$(python) benchmarks/step.py --ranks $(NP) $(ARGS)

overhead: ready  ## Time the fixed costs compared with plain TensorFlow: a tiny step, the start, imports (10 minutes)
	$(python) benchmarks/overhead.py $(ARGS)

sources = $(shell git ls-files '*.cc' '*.h' '*.cu' '*.cuh' 2>/dev/null)

format: ready  ## Format everything: Python by ruff, C++ and CUDA by clang-format
	$(python) -m ruff check --fix-only --quiet .
	$(python) -m ruff format .
	$(if $(sources),$(VENV)/bin/clang-format -i $(sources))

lint: ready  ## Check formatting, style (ruff, clang-format) and types (mypy)
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(if $(sources),$(VENV)/bin/clang-format --dry-run --Werror $(sources))
	$(python) -m mypy

wheel:  ## Build dist/collective_strategy-*.whl for every Python and TensorFlow (FOR="2.21.0 ..."), and try it (25 minutes)
	@tools/wheel.sh

docs: ready  ## Build the site of the documentation in build/docs; fails where a link or a name is wrong
	$(python) docs/build.py

image_kind = $(if $(filter 1,$(GPU)),gpu,cpu)

image:  ## Build the image collective:cpu, or with GPU=1 collective:gpu (docker/README.md)
	docker build --file docker/Dockerfile --target $(image_kind) --tag collective:$(image_kind) \
	    $(if $(filter cpu,$(image_kind)),--tag collective) $(if $(TENSORFLOW),--build-arg TENSORFLOW=$(TENSORFLOW)) $(ARGS) .

image-check: ready  ## Check docker/: a linter, the pins, docker's own checks; whichever of them is to be had here
	@docker/check.sh

test: lint  ## lint, and the tests: 20 minutes on two cores
	$(python) -m pytest $(ARGS)

test-slow: ready  ## A third of the tests that take three seconds and more, which CI runs, too: 10 minutes
	$(python) -m pytest --tier slow $(ARGS)

test-matrix: ready  ## What CI runs in addition: other numbers of ranks, the other backend, ...: 20 minutes
	$(python) -m pytest --tier matrix $(ARGS)

test-all: lint  ## lint, and every test in every configuration, with more examples: hours
	$(python) -m pytest -v --tier all $(ARGS)

test-versions:  ## The unit tests and a small job on each supported TensorFlow and Python that is there (environments in .venvs)
	@tools/test_versions.sh $(ARGS)

clean:  ## Remove what builds and tests leave (not environments: rm -rf .venv .venvs .python)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . \( -name .venv -o -name .venvs -o -name .python \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
