# make demo   sets everything up and shows one expression on numpy, torch and JAX
# make test   sets everything up and runs all tests and checks
# Needs Python 3.11+ and make. The set-up runs once, and again only when
# pyproject.toml or constraints.txt changes.

PYTHON  ?= python3
# Processes of pytest; each of them starts processes of its own.
WORKERS ?= 2
# More arguments for pytest: make test ARGS="-k gather"
ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip --no-input --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## create .venv with the pinned versions

# setuptools comes first, so that the build too uses the pinned one (--no-build-isolation).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "xshard needs Python 3.11 or later; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP) ## verify every expression on three runtimes, then train one model on all of them
	$(BIN)/xshard verify --all
	$(BIN)/python examples/train_parity.py

define LINT
$(BIN)/ruff check .
$(BIN)/ruff format --check .
$(BIN)/mypy
$(BIN)/lint-imports
endef

test: $(STAMP) ## pytest, then lint
	$(BIN)/pytest -n $(WORKERS) $(ARGS)
	$(LINT)

lint: $(STAMP) ## ruff, mypy and the order of imports alone
	$(LINT)

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## delete all that these targets made, .venv included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
