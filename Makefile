# What a person types; `make` alone lists it.

SHELL := /bin/sh
.DEFAULT_GOAL := help
# Prerequisites are steps in order here, also under -j.
.NOTPARALLEL:
.PHONY: help setup demo check test test-all test-adapters test-gvisor test-pods fuzz soak lint types format bench bench-peers clean dist docs release-check test-pythons system-packages other-systems

venv    := .venv
bin     := $(venv)/bin
package := $(venv)/.package
stamp   := $(venv)/.installed
# Only errors are shown; no notice about a newer pip.
pip     := PIP_DISABLE_PIP_VERSION_CHECK=1 $(bin)/python -m pip -qq
export PYTHON

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

setup: $(stamp) ## make .venv with the package (editable) and the development tools
	@:

# The package alone, with the launcher compiled: all that a user has.
$(package): pyproject.toml hatch_build.py $(wildcard native/*.c native/*.h native/*/*.c native/*/*.h)
	@echo "setup: checking Python and the C compiler"
	@python=$$(scripts/preflight) && { test -x $(bin)/pip || \
		{ echo "setup: making $(venv) with $$python" && "$$python" -m venv $(venv); }; }
	@echo "setup: compiling the launcher, installing the package into $(venv) (about 10 seconds)"
	@$(pip) install --editable .
	@touch $@

# What everything but the demo needs. A changed launcher is no reason to resolve this anew.
$(stamp): pyproject.toml | $(package)
	@echo "setup: installing the development tools into $(venv) (about a minute)"
	@$(pip) install 'pip>=25.1'
	@$(pip) install --group dev
	@touch $@

# Groups of pyproject.toml that few targets need.
$(venv)/.group-%: pyproject.toml | $(stamp)
	@echo "setup: installing the group $* into $(venv)"
	@$(pip) install --group $*
	@touch $@

# Clients of HTTP APIs, with requirements of their own: sandboxes of the tests import them from here.
.cache/clients/.installed: pyproject.toml | $(stamp)
	@echo "setup: installing clients of HTTP APIs into .cache/clients"
	@rm -rf .cache/clients && $(bin)/uv pip install --quiet --python $(bin)/python --target .cache/clients --group clients
	@touch $@

demo: $(package) ## see it work: half a minute the first time, then seconds
	@$(bin)/python examples/demo.py

check: setup ## the fast loop, under a minute on two cores: style, layers, types, unit tests, contract on one backend
	@$(bin)/python -m scripts.check

# What the tests of both runs use.
tested := system-packages other-systems $(venv)/.group-dist .cache/clients/.installed

test: $(tested) ## the gate, under ten minutes on two cores: style, layers, types, and a proof of each guarantee and attack
	@$(bin)/python -m scripts.test

test-all: $(tested) ## every test, with all repetitions and a soak, half an hour on two cores: nightly and before a release
	@$(bin)/python -m scripts.test --all

test-adapters: setup ## each adapter by its framework's own tests; NAMES="mcp ..." for some, BACKENDS=userns, RECORD=1 for the docs, LATEST=1
	@RECORD="$(RECORD)" LATEST="$(LATEST)" BACKENDS="$(or $(BACKENDS),userns bubblewrap)" $(bin)/python -m scripts.adapters $(NAMES)

test-pods: setup ## sessions in real pods; needs KUBECONFIG, SANDBOX_POD_IMAGE, SANDBOX_PLANE_HOST
	@KUBECONFIG="$(KUBECONFIG)" $(bin)/python -m pytest -q tests/plane/in_pods.py

test-gvisor: system-packages setup ## the suites inside gVisor, half an hour; PART=tests/contract/test_run.py for a part, RECORD=1 for the docs
	@RECORD="$(RECORD)" SANDBOX_TEST_PART="$(PART)" $(bin)/python -m pytest -q tests/environments/gvisor_suites.py

fuzz: $(venv)/.group-fuzz ## search for inputs that break a parser: SECONDS=60 for each target, RECORD=1 for the docs
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

bench: setup ## the numbers, on this machine; asks before it rewrites docs/benchmarks.md, WRITE=1 does without asking
	@answer=$$($(bin)/python -m bench.keep $(if $(WRITE),--write)) && \
		$(bin)/python -m bench $$answer && $(bin)/python -m bench.targets $$answer

bench-peers: setup ## what `make bench` compares with, from the package index, in .cache/peers
	@$(bin)/python -m bench.peers.install

docs: setup ## the documentation, in site/; first writes the generated pages anew
	@$(bin)/python -m scripts.reference
	@$(bin)/python -m scripts.sync_stubs
	@$(bin)/python -m scripts.import_graph
	@$(bin)/python -m scripts.completion
	@$(bin)/python -m scripts.manual
	@$(bin)/python -m scripts.badges
	@$(bin)/python -m scripts.docs

dist: $(venv)/.group-dist ## what is published, built and checked: source, and a wheel per kind of machine
	@$(bin)/python -m scripts.dist

release-check: $(venv)/.group-dist ## prove a release: build twice, compare bytes, SBOM, checksums; DRAFT=1 before the changelog entry
	@$(bin)/python -m scripts.release $(if $(DRAFT),--draft)

test-pythons: setup ## unit tests, the contract and waiting Pythons on every Python from 3.11 that is found; VERSIONS="3.12 3.13", PART=tests/unit, RECORD=1
	@PART="$(PART)" RECORD="$(RECORD)" $(bin)/python -m scripts.pythons $(VERSIONS)

clean: ## remove everything that was built or cached here
	@rm -rf $(venv) build dist site src/union/sandbox/_linux/bin .cache .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

other-systems: setup ## programs of other Debian releases and architectures that the tests use, in .cache
	@$(bin)/python -m tests.environments.debian

system-packages: ## the Debian packages that the tests use (installs them when root)
	@scripts/system-packages
