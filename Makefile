# The two commands a newcomer needs are `make demo` and `make test`. Both make .venv themselves.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow coverage lint types check chaos bench profile docs release matrix integrations \
	models figures figures-runs vendor clean

demo: $(VENV)/.demo
	$(BIN)/kfc demo

# Two tests side by side; each keeps to one thread.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# In an environment of its own: the peers it compares with bring much along.
test-slow: .venv-slow/.done
	.venv-slow/bin/python -m pytest -q -m slow

# Without the test that limits the size of files, in which coverage could not save its own.
coverage: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --cov --cov-report=term-missing --cov-fail-under=95 \
		--deselect tests/test_kill.py::test_a_full_disk_keeps_the_last_checkpoint

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# What CI runs.
check: lint types test

# Random kills, damaged files, mutated states and exceptions, for ten minutes: make chaos SEED=1.
# The same command continues after an interruption.
SEED ?= 0
chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos.py --seed $(SEED)

# In an environment of its own, with the libraries it compares with. BENCH="--help" for options.
bench: benchmarks/.venv/.done
	benchmarks/.venv/bin/python benchmarks/run.py $(BENCH)

# NETWORK=digits, for instance, profiles another network than the paper's.
profile: $(VENV)/.dev
	$(BIN)/python benchmarks/profile_step.py $(if $(NETWORK),--network $(NETWORK))

docs: $(VENV)/.docs docs/gallery/.done
	$(BIN)/mkdocs build --strict

# The pages of docs/gallery.md, by the commands that it shows: too large to be committed, and made in
# a few minutes. They are made again when the code of the pages changes.
docs/gallery/.done: $(VENV)/.docs $(wildcard src/kfc/lab/report/*.py src/kfc/lab/report/templates/*)
	rm -rf .gallery docs/gallery
	mkdir -p .gallery docs/gallery
	$(IN_GALLERY) kfc demo --out demo
	$(IN_GALLERY) kfc train --data digits --epochs 5 --out digits
	$(IN_GALLERY) kfc inspect digits --budget 1m --advise
	$(IN_GALLERY) kfc plan resnet20
	cp .gallery/demo/report.html docs/gallery/demo.html
	cp .gallery/inspect.html .gallery/plan.html docs/gallery
	touch $@

IN_GALLERY := cd .gallery && PATH="$(abspath $(BIN)):$$PATH"

# Build the wheel and the source distribution, try them in clean environments, and say how to upload
# them.
release: .venv-release/.done
	.venv-release/bin/python tests/release.py

# The tests with other versions of Python and torch: make matrix PAIRS="3.11:2.13.0 3.12:2.13.0".
# Only CPU builds of torch are installed, for which pip needs a source.
PAIRS ?= 3.11:2.13.0
matrix:
	$(PYTHON) tests/matrix.py $(PAIRS)

# The programs of docs/integrations.md, with Lightning, Accelerate, Transformers, timm and peft.
integrations: .venv-integrations/.done
	.venv-integrations/bin/python -m pytest -q -m "slow or not slow" tests/test_integrations.py

# Continue the table of docs/models.md. MODELS="--help" for options.
models: .venv-integrations/.done
	.venv-integrations/bin/python benchmarks/models.py $(MODELS)

# The figures and tables of docs/reproduction.md, from the recorded curves.
figures: $(VENV)/.dev
	$(BIN)/python benchmarks/paper_figures.py

# Begin or continue the runs of the paper's figures, which take many hours; Ctrl-C interrupts them.
# Afterwards their curves are recorded. ONLY="figure4" runs some of them.
ONLY ?= benchmarks/figures/rates.toml figure4 benchmarks/figures/weight-decay.toml figure3-cifar10 \
	benchmarks/figures/baselines.toml figure5 figure3-svhn figure5-svhn
FIGURES ?= runs/figures
figures-runs: $(VENV)/.dev
	for what in $(ONLY); do \
		folder=$(FIGURES)/$$(basename $$what .toml); \
		if [ -e $$folder ]; then $(BIN)/kfc compare --resume $$folder; \
		else $(BIN)/kfc compare $$what --threads 1 --out $$folder; fi || break; \
	done
	$(BIN)/python benchmarks/paper_figures.py --from $(FIGURES)

# Replace the plotting library of the pages by another version from npm: make vendor PLOTLY=4.1.1
vendor:
	npm pack --silent plotly.js-cartesian-dist-min@$(PLOTLY)
	tar -xOzf plotly.js-cartesian-dist-min-$(PLOTLY).tgz package/plotly-cartesian.min.js \
		| gzip -9n > src/kfc/lab/report/vendor/plotly-cartesian.min.js.gz
	rm plotly.js-cartesian-dist-min-$(PLOTLY).tgz

clean:
	rm -rf $(VENV) .venv-slow .venv-matrix .venv-integrations .venv-release benchmarks/.venv
	rm -rf runs site dist .gallery docs/gallery .chaos

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

.venv-release/.done: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install -q -c constraints.txt build twine
	touch $@

# torch first: it satisfies what the libraries require, so that pip installs no other build.
.venv-integrations/.done: pyproject.toml constraints.txt tests/integrations.txt
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install -q -c constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	.venv-integrations/bin/python -m pip install -q -c constraints.txt \
		-r tests/integrations.txt -e ".[dev]"
	touch $@

# A library that cannot be installed is reported by the benchmark, and does not stop it.
benchmarks/.venv/.done: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv benchmarks/.venv
	benchmarks/.venv/bin/python -m pip install -q -c constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	benchmarks/.venv/bin/python -m pip install -q -c constraints.txt -e .
	grep -v '^#' benchmarks/requirements.txt | while read name; do \
		benchmarks/.venv/bin/python -m pip install -q -c constraints.txt "$$name" \
			|| echo "not installed: $$name"; \
	done
	touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(PIP) -e ".[dev,docs]"
	touch $@
