# Two commands: `make demo` (the main job) and `make test` (what CI runs). Both make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint bench docs-check clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      the main job: train from S3 through the cache, kill everything, resume exactly (<= 4 min)"
	@echo "make test      lint, types, import direction, tests (what CI runs)"
	@echo "make test-all  the same plus the slow and chaos sets"
	@echo "make bench     ratios against peers and limits, with a table"

$(STAMP): pyproject.toml constraints.txt tools/make_env.sh
	@PYTHON="$(PYTHON)" sh tools/make_env.sh "$(VENV)"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m demo --out demo-out

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "not slow" -n 2 --dist loadgroup

test-all: lint
	$(BIN)/pytest -n 2 --dist loadgroup

bench: $(STAMP)
	@$(BIN)/python -m bench --out bench-out

clean:
	rm -rf $(VENV) demo-out bench-out build dist *.egg-info
