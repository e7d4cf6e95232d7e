# What a clone needs: Python 3.11 or newer and make. Everything is installed into $(VENV), nothing outside it.
#
# Variables, all of them optional:
#   PYTHON     the Python that makes the environment (default: the first of python3, python3.14 ... 3.11 that is new enough)
#   VENV       where the environment goes
#   VENV_ARGS  arguments of `python -m venv`; --system-site-packages lets it use the torch and MPI of a container
#   TORCH      what `make test` installs when torch cannot be found; empty: nothing, and tests that need it are skipped
#   TORCH_ARGS arguments of that `pip install`, e.g. --index-url URL of PyTorch's index of CPU wheels
#   ARGS       arguments of `crosstraffic run` in `make run`, of pytest in `make test`

VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
ARGS ?=

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(firstword $(foreach name,$(CANDIDATES),$(shell $(name) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(name))))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: help run test check clean
.DEFAULT_GOAL := help

help:  ## Say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/.local  ## Measure this machine with the default scenario and write a report (ARGS="--budget 60" ...)
	$(BIN)/crosstraffic run $(ARGS)

test: $(VENV)/.dev  ## Run the tests (ARGS="-k name" ...)
	@if [ -n '$(TORCH)' ] && ! $(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then \
		echo 'installing $(TORCH) into $(VENV)'; \
		$(PIP) $(TORCH_ARGS) '$(TORCH)'; \
	fi
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev  ## Lint, check the format, check the types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

clean:  ## Remove the environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks site
	find crosstraffic tests -type d -name __pycache__ -prune -exec rm -rf {} +

# A stamp is newer than pyproject.toml once what it stands for is installed.
$(VENV)/.made:
	@if [ ! -e $(VENV) ]; then \
		python='$(or $(PYTHON),python3)'; \
		"$$python" -c '$(NEW_ENOUGH)' 2>/dev/null || { \
			echo "crosstraffic needs Python 3.11 or newer; $$python is $$("$$python" --version 2>&1 || true)." >&2; \
			echo 'Name another: make PYTHON=/path/to/python3.11' >&2; \
			exit 1; }; \
		"$$python" -m venv $(VENV_ARGS) $(VENV) || { rm -rf $(VENV); exit 1; }; \
	fi
	@$(BIN)/python -c '$(NEW_ENOUGH)' && $(BIN)/python -m pip --version >/dev/null || { \
		echo '$(VENV) is no environment of Python 3.11 or newer with pip: remove it, or name another with make VENV=DIR' >&2; exit 1; }
	@touch $@

$(VENV)/.local: pyproject.toml $(VENV)/.made
	@echo 'installing crosstraffic and what it needs to run on this machine into $(VENV)'
	@$(PIP) --quiet --editable '.[local]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.made
	@echo 'installing crosstraffic and what its tests need into $(VENV)'
	@$(PIP) --quiet --editable '.[local,dev]'
	@touch $(VENV)/.local $@
