# Two commands on a fresh machine: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test test-unit test-live check lock clean
.DEFAULT_GOAL := help

help:
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install the pinned packages (about 2 minutes, 4 GB)

$(STAMP): requirements/cpu.lock requirements/dev.lock pyproject.toml
	@echo "set-up: installing pinned packages into $(VENV) (about 2 minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock -r requirements/dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup  ## one chat through a real prefill engine, KV transfer and decode engine
	@$(BIN)/pdserve demo

test: setup test-unit test-k8s test-live  ## everything that CI runs

test-unit: setup  ## seconds; no Ray, no sleep, no network
	@$(BIN)/python -m pytest tests/unit -q

test-live: setup  ## real engines on this machine, minutes on 2 cores
	@$(BIN)/python -m pytest tests/parity tests/live -q -m "not slow"

test-live-all: setup  ## also layouts, failures, autoscaling, routing, Kubernetes on live clusters (an hour)
	@$(BIN)/python -m pytest tests/parity tests/live -q

check: setup  ## ruff, mypy (strict on pure modules), import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

lock: setup  ## resolve requirements/gpu.lock again (needs uv)
	@uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
	  --extra gpu pyproject.toml -o requirements/gpu.lock

clean:  ## remove caches and reports, keep .venv
	@rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis

include $(wildcard mk/*.mk)
