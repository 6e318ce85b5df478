# make report: set everything up and run the main job.  make test: set everything up and run the tests.
PYTHON ?= python3
VENV ?= .venv
# More arguments for Snakemake, such as ARGS="--configfile examples/small.yaml"
ARGS ?=
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: report test lint types unit workflow slurm browser clone lock

report: $(VENV)/.installed
	snakemake --cores 4 --resources gpu=1 $(ARGS)

# The tests of Slurm mostly wait for it, and so run beside those of the workflow.
test: lint types unit
	$(MAKE) -j 2 --output-sync workflow slurm
	$(MAKE) browser clone

lint: $(VENV)/.installed-dev
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow/rules
	snakemake --lint

types: $(VENV)/.installed-dev
	mypy

unit: $(VENV)/.installed-dev
	pytest tests/unit -n 2

workflow: $(VENV)/.installed-dev
	pytest tests/workflow -n 2

# A real Slurm on this machine, if Debian's slurm-wlm and munge are installed and this is root.
slurm: $(VENV)/.installed-dev
	pytest tests/slurm

browser: $(VENV)/.installed-dev
	pytest tests/report

# The main job on a small configuration, in a fresh clone, and once more with nothing to do.
clone: $(VENV)/.installed-dev
	bash tests/fresh_clone.sh

$(VENV)/.installed: pyproject.toml envs/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e . -c envs/constraints.txt
	touch $@

$(VENV)/.installed-dev: pyproject.toml envs/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[dev]" -c envs/constraints.txt
	touch $@ $(VENV)/.installed

# Pin what a fresh environment resolves to now. Use the oldest Python (PYTHON=python3.11 of Debian is
# 3.11.2): newer releases of a package may refuse it. torch stays where it is until it was tried.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install -q torch==2.13.0
	$(VENV)-lock/bin/python -m pip install -q -e ".[dev]"
	(echo "# Everything the tests and the main job ran with; pip takes it with -c. Made by: make lock"; \
	 $(VENV)-lock/bin/python -m pip list --format=freeze | sed 's/+cpu//' \
	 | grep -v -i -E '^(halfscale|pip|setuptools)==') > envs/constraints.txt
	rm -r $(VENV)-lock
