# make demo   installs torch, JAX and a terminal's tables, and shows xshard in a minute
# make check  sets everything up and runs what stays inside one interpreter, and the lint
# make test   sets everything up and runs all tests and checks
# Needs Python 3.11+ and make. The set-up runs once, and again only when
# pyproject.toml or the constraints change.

PYTHON      ?= python3
# The versions to install: constraints.txt, or constraints-newest.txt.
CONSTRAINTS ?= constraints.txt
# Processes of pytest; each of them starts processes of its own: more of them than cores take longer.
WORKERS     ?= 2
# What the random tests of make fuzz begin with: a seed names the same chains and texts for ever.
SEED        ?= 1
# More arguments for pytest: make test ARGS="-k gather"
ARGS        ?=

# A release of pyright that is newer than the pinned one is no reason to ask for it.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Each interpreter with each set of versions has an environment of its own.
ifeq ($(PYTHON) $(CONSTRAINTS),python3 constraints.txt)
VENV := .venv
else
VENV := .venv-$(notdir $(PYTHON))-$(basename $(notdir $(CONSTRAINTS)))
endif
BIN  := $(VENV)/bin
PIP  := -m pip --no-input --disable-pip-version-check install -c $(CONSTRAINTS)
DEV  := $(VENV)/.installed-dev
JAX  := $(VENV)/.installed-dev-jax
# The demo needs little, and has an environment of its own.
DEMO := .venv-demo

# The part of the suite that needs no torch, without the longest files.
JAX_TESTS := tests/notation tests/layout tests/steps tests/cost tests/nn tests/plans tests/contractions tests/pictures tests/state \
	tests/jax_bridge tests/test_rules.py tests/test_models.py \
	tests/test_arguments.py tests/test_errors.py tests/test_planner.py tests/test_reference.py tests/test_replicas.py \
	$(addprefix --ignore=tests/jax_bridge/,test_nn.py test_nn_cases.py test_processes.py)

# The part of the suite that tells whether another release of torch does what the bridge needs.
TORCH_TESTS := $(addprefix tests/torch_bridge/,test_versions.py test_misuse.py calls contractions dtensor lower redistribution \
	models/test_parallelize.py models/test_precision.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-jax test-torch fuzz docs docs-version lint format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(DEV) ## create .venv with the pinned versions

# The name of the file says which extra is installed. setuptools comes first, so that the build too uses the pinned
# one (--no-build-isolation).
$(VENV)/.installed-% $(DEMO)/.installed-%: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xshard needs Python 3.11 or later; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) setuptools
	$(@D)/bin/python $(PIP) --no-build-isolation -e '.[$*]'
	@touch $@

demo: $(DEMO)/.installed-demo ## what a move sends, which gradient is right, one model in torch and in JAX: a minute
	$(DEMO)/bin/python examples/demo.py

define LINT
$(BIN)/ruff check .
$(BIN)/ruff format --check .
$(BIN)/mypy
$(BIN)/pyright --pythonpath $(BIN)/python
$(BIN)/lint-imports
endef

check: $(DEV) ## lint, and quick tests that load no framework and start no process: under 100 seconds
	$(LINT)
	$(BIN)/pytest -n $(WORKERS) --quick $(ARGS)

test: $(DEV) ## all tests, then lint
	$(BIN)/pytest -n $(WORKERS) $(ARGS)
	$(LINT)

test-jax: $(JAX) ## the tests of the core and of JAX that need no torch, which is not installed for them
	$(BIN)/pytest -n $(WORKERS) --without torch $(JAX_TESTS) $(ARGS)

test-torch: $(DEV) ## the tests of the bridge of torch that depend on torch's release most: minutes
	$(BIN)/pytest -n $(WORKERS) $(TORCH_TESTS) $(ARGS)

fuzz: $(DEV) ## random moves, contractions, trees and mutated input by the hundred thousand: hours; make fuzz SEED=7
	$(BIN)/python -m tests.fuzz numpy --moves 100000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz torch --moves 10000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz jax --moves 2000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz jax-novma --moves 1000 --seed $(SEED)
	for each in numpy-between numpy-einsum numpy-trees numpy-owners; do $(BIN)/python -m tests.fuzz $$each --moves 20000 --seed $(SEED) || exit; done
	for each in torch-between torch-einsum torch-trees torch-owners; do $(BIN)/python -m tests.fuzz $$each --moves 1000 --seed $(SEED) || exit; done
	for each in jax-einsum jax-novma-einsum jax-trees jax-owners; do $(BIN)/python -m tests.fuzz $$each --moves 300 --seed $(SEED) || exit; done
	$(BIN)/python -m tests.fuzz owner-steps --moves 100000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz models --moves 3000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz texts --moves 1000000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz.soak

docs: $(DEV) ## build the documentation site in build/site, without a network; a warning is an error
	$(BIN)/mkdocs build

docs-version: $(DEV) ## add this version of the site to the branch gh-pages: make docs-version VERSION=0.1
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/mike deploy --update-aliases $(VERSION) latest

lint: $(DEV) ## ruff, both type checkers and the order of imports alone
	$(LINT)

format: $(DEV) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## delete all that these targets made, every .venv included
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
