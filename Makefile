# Every target makes its own virtual environment; nothing else has to be installed first.
#   make demo    watch an overconfident network become honest
#   make test    lint, types, layers and all tests
#   make lint    ruff, mypy and import-linter alone
#   make bench   our fit beside the published search
#   make figures the README's numbers and pictures, from the demo pack
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

export PYTHONDONTWRITEBYTECODE := 1

.PHONY: demo test lint bench figures clean

demo: $(VENV)/.demo
	$(BIN)/featcal demo

test: lint
	$(BIN)/python -m pytest -q --cov --cov-report=term

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.demo
	$(BIN)/python bench/clip.py

figures: $(VENV)/.demo
	$(BIN)/python experiments/figures.py

# hatchling comes first and is used as installed, so that the build is pinned like everything else.
$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "featcal needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) --no-build-isolation -e '.[report]'
	touch $@

$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) featcal-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
