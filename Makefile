# Every target makes its own virtual environment; nothing else has to be installed first.
#   make demo    watch an overconfident network become honest
#   make test    lint, types, layers and all tests
#   make cover   the tests again, with the share of branches they reach (at least 95 %)
#   make lint    ruff, mypy and import-linter alone
#   make docs    this documentation as a site in build/docs, warnings as errors
#   make bench   our fits beside the published search and other libraries (installs them), memory, growth, the report, several
#                processes: writes results/bench-*.json and the tables of docs/benchmarks.md (half an hour on an idle machine)
#   make figures the README's numbers and pictures, from the demo pack
#   make examples   an ImageNet network and a text classifier, calibrated end to end, from ../shared (minutes)
#   make reproduce  our results beside the paper's tables, from ../shared (minutes)
#   make study      every recipe on every pack, 20 resplits: docs/research.md (hours on two cores, 20 minutes on 16);
#                   EXTRA=folder adds networks that are held out
#   make published DATA=folder   trains the paper's networks as published and fills its tables (needs a GPU, and
#                   goes on where it was stopped); the folder holds cifar10/ and cifar100/, see docs/datasets.md
#   make merge WORK=folder   puts the finished runs of a folder into results/ and the pages
#   make grid DATA=folder   the same losses in short runs
#   make shift RUN=folder DATA=folder   what recipes fitted on clean images are worth on damaged ones: a network
#                   that experiments/train_published.py trained with --keep-weights (an hour without a GPU)
#   make mutants    whether the tests notice wrong lines in core and metrics (a quarter of an hour): WORKERS=2 at a
#                   time, SAMPLE=400 of them (0 for all)
#   make coverage   how often intervals hold the truth, and how often marks are wrong: docs/trust.md (two hours of one
#                   core; WORKERS=16 shares them out)
#   make fuzz      broken, lying and hostile inputs for every reader: docs/trust.md (MINUTES=10)
#   make kills      kills every command that writes, fills its disk, starts it twice: docs/trust.md (ten minutes; mounts a
#                   small disk in memory where it may, which needs root)
#   make advice     how often the report's recommendation does harm: docs/trust.md (half an hour on 16 cores)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
# Modules are compiled when they are first imported, into a folder of their own, whatever the shell says of bytecode:
# few of those that are installed ever are, and the tests start many processes, which would compile torch each time.
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt

export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test cover lint docs bench figures examples reproduce study published merge grid shift coverage mutants fuzz kills advice clean

demo: $(VENV)/.demo
	$(BIN)/featcal demo

# Ray has a process of its own: it leaves threads and signal handlers behind.
test: lint
	$(BIN)/python -m pytest -q tests/bridges/test_ray.py
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore tests/bridges/test_ray.py

cover: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --cov --cov-report=term

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/docs/index.html

bench: $(BENCH)/.peers
	$(BENCH)/bin/python bench/cpu.py
	$(BENCH)/bin/python bench/report.py
	$(BENCH)/bin/python bench/scale.py
	$(BENCH)/bin/python bench/tables.py

figures: $(VENV)/.demo
	$(BIN)/python experiments/figures.py
	$(BIN)/python experiments/theory_figure.py

examples: $(VENV)/.examples
	$(BIN)/python examples/imagenet_efficientnet.py
	$(BIN)/python examples/text_intents.py

reproduce: $(VENV)/.demo
	$(BIN)/python experiments/reproduction.py
	$(BIN)/python experiments/paper_tables.py
	$(BIN)/python experiments/paper_docs.py

# Each run has a folder in WORK, with its checkpoint until it is done.
published: WORK ?= $(DATA)/published
published: $(VENV)/.demo
	$(BIN)/python experiments/train_published.py --data $(or $(DATA),$(error give the folder of the images: make published DATA=folder)) --work $(WORK)
	$(MAKE) merge WORK=$(WORK)

merge: $(VENV)/.demo
	$(BIN)/python experiments/train_published.py --merge $(or $(WORK),$(error give the folder of the runs: make merge WORK=folder))
	$(BIN)/python experiments/paper_tables.py
	$(BIN)/python experiments/paper_docs.py

study: $(VENV)/.dev
	$(BIN)/python experiments/study.py $(if $(EXTRA),--extra $(EXTRA))
	$(BIN)/python experiments/study.py --speed
	$(BIN)/python experiments/study_docs.py
	$(BIN)/python experiments/variants.py $(if $(EXTRA),--extra $(EXTRA))

grid: $(VENV)/.demo
	$(BIN)/python experiments/train_grid.py --data $(or $(DATA),$(error give the folder of the images: make grid DATA=folder))

shift: $(VENV)/.demo
	$(BIN)/python experiments/shift.py --docs --run $(or $(RUN),$(error give a trained network: make shift RUN=folder DATA=folder)) \
	  --data $(or $(DATA),$(error give the folder of the images: make shift RUN=folder DATA=folder))

advice: $(VENV)/.demo
	$(BIN)/python experiments/advice.py

coverage: $(VENV)/.demo
	$(BIN)/python experiments/interval_coverage.py --rows 300 1000 10000 --sets 200 100 --workers $(or $(WORKERS),1) --write

mutants: $(VENV)/.dev
	$(BIN)/python experiments/mutants.py --workers $(or $(WORKERS),2) --sample $(or $(SAMPLE),400)

fuzz: $(VENV)/.dev
	$(BIN)/python experiments/fuzz.py --minutes $(or $(MINUTES),10)

kills: $(VENV)/.dev
	$(BIN)/python experiments/kills.py

# hatchling comes first and is used as installed, so that the build is pinned like everything else.
$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "featcal needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) --no-build-isolation -e '.[report]'
	touch $@

# torchvision and timm come without their dependencies: torchvision has no build beside the CPU torch, and would bring
# another; the tests need its Python alone.
$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) --no-build-isolation -e '.[dev]'
	$(PIP) --no-deps torchvision timm
	touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --no-build-isolation -e '.[docs,sklearn]'
	touch $@

$(VENV)/.examples: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) --no-build-isolation -e '.[examples]'
	touch $@ $(VENV)/.demo

# The peers come without their dependencies, which would bring another torch: peers.txt names them.
$(BENCH)/.peers: pyproject.toml constraints.txt bench/peers.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt hatchling editables
	$(BENCH)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt --no-build-isolation -e '.[report]' scikit-learn
	$(BENCH)/bin/pip --disable-pip-version-check install --quiet -c constraints.txt --no-deps -r bench/peers.txt
	touch $@

clean:
	rm -rf $(VENV) $(BENCH) .cache build featcal-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
