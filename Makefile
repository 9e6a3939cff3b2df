# The two commands a newcomer needs are `make demo` and `make test`. Both make .venv themselves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow coverage lint types check bench-moments bench-step docs clean

demo: $(VENV)/.demo
	$(BIN)/kfc demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

# In an environment of its own: the peers it compares with bring much along.
test-slow: .venv-slow/.done
	.venv-slow/bin/python -m pytest -q -m slow

coverage: $(VENV)/.dev
	$(BIN)/python -m pytest -q --cov --cov-report=term-missing --cov-fail-under=95

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# What CI runs.
check: lint types test

bench-moments: $(VENV)/.dev
	$(BIN)/python benchmarks/second_moment.py

bench-step: $(VENV)/.dev
	$(BIN)/python benchmarks/step.py

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-slow runs site

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: an unpinned torch, asked for by another package, brings all of CUDA.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) -e ".[experiments]"
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) -e ".[dev]"
	touch $@

.venv-slow/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-slow
	.venv-slow/bin/python -m pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	.venv-slow/bin/python -m pip install -q -c constraints.txt -e ".[dev,peers]"
	touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(PIP) -e ".[dev,docs]"
	touch $@
