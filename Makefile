# The tests take both cores of a small machine, so they run one after the other.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install install-dev demo bench test lint check clean

BIN := .venv/bin
MODEL ?=
ARGS ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: ## set up .venv (a few minutes and 3.5 GB; PYTHON=path picks the interpreter)
	@scripts/install.sh

install-dev: ## the same, with what tests and checks need
	@scripts/install.sh --dev

demo: install ## train a small model on sums, on this machine (MODEL=path, ARGS='--loss.tau 0.3')
	@$(BIN)/real-ray demo $(if $(MODEL),--model "$(MODEL)") $(ARGS)

bench: install ## measure the learner against a plain Hugging Face loop (ARGS='--rounds 5')
	@$(BIN)/python bench/learner.py $(ARGS)

test: install-dev ## run all tests (ARGS='-k name' picks some)
	@$(BIN)/pytest $(wildcard tests/unit tests/ray tests/e2e tests/gpu) $(ARGS)

lint: install-dev ## check style, types and the dependency rule
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## lint, then test

clean: ## remove .venv, caches and builds (runs/ stays)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find real_ray actors tests -name __pycache__ -type d -prune -exec rm -rf {} +
