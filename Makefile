# What a person types; `make` alone lists it.

SHELL := /bin/sh
.DEFAULT_GOAL := help
# Prerequisites are steps in order here, also under -j.
.NOTPARALLEL:
.PHONY: help setup demo test test-pods fuzz soak lint types format bench bench-peers clean dist docs system-packages

venv   := .venv
bin    := $(venv)/bin
stamp  := $(venv)/.installed
# Only errors are shown; no notice about a newer pip.
pip    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(bin)/python -m pip -qq
export PYTHON

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

setup: $(stamp) ## make .venv with the package (editable) and the development tools
	@:

$(stamp): pyproject.toml hatch_build.py $(wildcard native/*.c native/*.h)
	@python=$$(scripts/find-python) && "$$python" -m venv $(venv)
	@$(pip) install --upgrade 'pip>=25.1'
	@$(pip) install --editable . --group dev
	@touch $@

demo: setup ## see it work
	@$(bin)/python examples/demo.py

test: system-packages setup lint types ## everything that must hold: style, layers, types, tests
	@$(pip) install --group dist
	@$(bin)/python scripts/test.py

test-pods: setup ## sessions in real pods; needs KUBECONFIG, SANDBOX_POD_IMAGE, SANDBOX_PLANE_HOST
	@KUBECONFIG="$(KUBECONFIG)" $(bin)/python -m pytest -q tests/plane/in_pods.py

fuzz: setup ## search for inputs that break a parser: SECONDS=60 for each target, RECORD=1 for the docs
	@$(pip) install --group fuzz
	@nice -n 15 $(bin)/python -m tests.fuzz.run --seconds $(or $(SECONDS),60) $(if $(RECORD),--record)

soak: setup ## mixed load and kills for MINUTES=3; SOAK=--record writes docs/reference/soak.md
	@$(bin)/python -m scripts.soak --minutes $(or $(MINUTES),3) $(SOAK)

lint: setup ## style, formatting, and who imports whom
	@$(bin)/ruff check .
	@$(bin)/ruff format --check --quiet .
	@$(bin)/lint-imports

types: setup ## mypy, strict
	@$(bin)/mypy

format: setup ## rewrite to the house format, with the safe fixes
	@$(bin)/ruff check --fix-only --quiet .
	@$(bin)/ruff format --quiet .

bench: setup ## the numbers, on this machine; also for the README
	@$(bin)/python -m bench

bench-peers: setup ## what `make bench` compares with, from the package index, in .cache/peers
	@$(bin)/python -m bench.peers.install

docs: setup ## the documentation, in site/; first writes the generated pages anew
	@$(bin)/python -m scripts.reference
	@$(bin)/python -m scripts.docs

dist: setup ## what is published, built and checked: source, and a wheel per kind of machine
	@$(pip) install --group dist
	@$(bin)/python -m scripts.dist

clean: ## remove everything that was built or cached here
	@rm -rf $(venv) build dist site src/union/sandbox/_linux/bin .cache .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

system-packages: ## the Debian packages that the tests use (installs them when root)
	@scripts/system-packages
