# A fresh machine needs Python 3.11 or newer and nothing else: every target sets up .venv first, once.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: demo test lint bench setup
.DEFAULT_GOAL := test

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/placement demo $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m bench.run $(ARGS)

# torch first and alone, so that pip takes the file of the index that the machine is set up for (CPU or CUDA).
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { test -n "$(PYTHON)" || { echo "placement needs Python 3.11 or newer with venv"; exit 1; }; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
