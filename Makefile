# A fresh machine needs Python 3.11 or newer and nothing else: every target sets up .venv first, once.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
FRAMEWORKS := $(VENV)/.frameworks
COMPILED := $(VENV)/.compiled
SYSTEM := $(VENV)/.system
ENGINES := $(VENV)/.engines
DOCS := $(VENV)/.docs
MERMAID := $(VENV)/mermaid.min.js
# pip's own compiling doubles its time: one package is compiled while the next is fetched, and the rest when it is first imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# So bytecode is kept, whatever the caller's environment says; many tests start interpreters of their own.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo example test durations lint bench docs matrix setup
.DEFAULT_GOAL := test

setup: $(STAMP)

demo: $(STAMP)
	@$(BIN)/placement demo $(ARGS)

# A model with real weights, GRPO with TRL: ARGS=--without-placement is its twin.
example: $(FRAMEWORKS)
	@$(BIN)/python -m examples.grpo_trl $(ARGS)

# Tensors come and go by the thousand: memory that malloc gives back at once is faulted in anew each time.
# Two processes more than there are cores keep these busy: now and then one waits for a server, a deadline or a rank.
TEST_PROCESSES ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 6 ? cores + 2 : 8)))
test: export MALLOC_MMAP_THRESHOLD_ = 4294967296
test: export MALLOC_TRIM_THRESHOLD_ = 4294967296
# Only the tests that --slow adds need packages of the system; those are fetched while pip fetches the rest.
test:
	@$(MAKE) --no-print-directory --jobs=3 $(COMPILED) $(ENGINES) $(if $(findstring --slow,$(ARGS)),$(SYSTEM))
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

# By these the next runs are ordered: what takes long begins first.
durations:
	@$(MAKE) --no-print-directory test ARGS="--record-durations $(ARGS)"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m bench.run $(ARGS)

# Other versions of Python and torch, which .ci/matrix.toml names: ONLY='*-2.11' chooses, QUICK=1 leaves out what takes long.
matrix: $(STAMP)
	@$(BIN)/python .ci/matrix.py $(if $(ONLY),--only '$(ONLY)') $(if $(QUICK),--quick) $(ARGS)

# The site, into build/site. Strict: a link or an anchor that leads nowhere, or a page outside the navigation, is an error.
docs: $(DOCS)
	@MERMAID_SCRIPT=$(MERMAID) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS) && echo "build/site/index.html"

# torch first and alone, so that pip takes the file of the index that the machine is set up for (CPU or CUDA).
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { test -n "$(PYTHON)" || { echo "placement needs Python 3.11 or newer with venv"; exit 1; }; $(PYTHON) -m venv $(VENV); }
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m compileall -q $(VENV)/lib/*/site-packages/torch >/dev/null 2>&1 & $(PIP) -c constraints.txt -e ".[dev]"; status=$$?; wait; exit $$status
	@touch $@

# What only tests need: together, or one by one where one of them cannot be had; its tests are then skipped and say so.
$(FRAMEWORKS): export DS_BUILD_OPS = 0
$(FRAMEWORKS): $(STAMP) tests/frameworks.txt
	@$(PIP) --no-deps -r tests/frameworks.txt || grep -v '^#' tests/frameworks.txt | while read -r package; do \
		$(PIP) --no-deps "$$package" || echo "$$package cannot be installed here: its tests will be skipped (remove $@ to try again)"; done
	@touch $@

# What tests import is compiled once, not by each of their processes. The run itself shows what cannot be imported.
$(COMPILED): $(FRAMEWORKS)
	@$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 || true
	@touch $@

# A few files of released engines, whose classes tests run.
$(ENGINES): $(STAMP) tests/engines/released.py
	@$(BIN)/python -m tests.engines.released $(VENV)/engines || echo "files of released engines cannot be fetched here: their tests will be skipped (remove $@ to try again)"
	@touch $@

# The script that draws the diagrams becomes part of the site where npm can fetch it; else a browser fetches it when a page is shown.
$(DOCS): $(STAMP)
	@$(PIP) -c constraints.txt -e ".[docs]"
	@! command -v npm >/dev/null || (cd $(VENV) && npm pack --silent mermaid@11.17.2 >/dev/null \
		&& tar -xzf mermaid-11.17.2.tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-11.17.2.tgz) \
		|| echo "mermaid cannot be fetched here: diagrams of the site will load it (remove $@ to try again)"
	@touch $@

$(SYSTEM): tests/system_packages.sh
	@sh tests/system_packages.sh
	@mkdir -p $(VENV) && touch $@
