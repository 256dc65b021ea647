# make demo    a tour: a photograph filtered, real layers run and checked, pictures in demo-output/
# make test    every kind of test that this machine can run (on a GPU too, where there is one)
# make docs    figures and tables of the pages, and the site: build/site/index.html
# They make .venv first. CUDA=cu12 takes the wheels for drivers below CUDA 13.

PYTHON ?= python3
CUDA ?= cu13
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# A module is compiled when it is first imported, once: most of PyTorch's never are.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all pythons lint format types docs site clean

demo: $(VENV)/.demo
	$(BIN)/leanconv demo

# One BLAS thread for each worker: two that wait for a core that others hold spin for seconds.
test test-all: export OMP_NUM_THREADS ?= 1
# All tests together leave out the studies, and show no values of failed asserts: to rewrite the asserts takes each worker
# 6 s. TESTS=tests/research, or any other, runs those, with values; with -k also what all tests together leave out.
ALL := --assert=plain --ignore=tests/research
test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(if $(findstring -k,$(TESTS)),,-m "not exhaustive") $(if $(TESTS),$(TESTS),$(ALL))

# Also every variant in every layout on every case, every architecture, the studies, and whether tests see random edits of
# the host code: some 15 minutes on two cores.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(TESTS)
	$(if $(TESTS),,$(BIN)/python scripts/mutate.py)

# The wheel on the oldest Python with the lowest versions of what it needs, where that is installed, and kernels with the
# oldest compiler of CUDA 13; PYTHONS=all runs every environment of the script.
PYTHONS ?= 3.10+lowest 3.10+cu13+lowest
pythons: $(VENV)/.made
	$(BIN)/python scripts/other_pythons.py $(PYTHONS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.test
	$(BIN)/mypy

# The tables and figures of the pages, from the committed results; and the site.
docs: $(VENV)/.test
	$(BIN)/python -m report pages
	$(BIN)/python -m research pages
	$(BIN)/python -m research pictures
	$(MAKE) site

# The site, in build/site: warnings and links that lead nowhere are errors. What builds it is pinned.
# Examples are executed on one thread: two that wait for a core that others hold spin for seconds.
site: export OMP_NUM_THREADS ?= 1
site: $(VENV)/.docs
	$(BIN)/python scripts/make_site.py

clean:
	rm -rf $(VENV) $(VENV)-3.* build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each stamp names what is installed; a new pyproject.toml installs again.
$(VENV)/.made:
	$(PYTHON) scripts/make_venv.py $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(PIP) -e '.[bench,$(CUDA)]'
	@touch $@

$(VENV)/.docs: $(VENV)/.test docs/requirements.txt
	$(PIP) -r docs/requirements.txt
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	$(PIP) -e '.[test,$(CUDA)]'
	@touch $@ $(VENV)/.demo
