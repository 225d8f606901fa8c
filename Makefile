# make demo, make compare, make test, make test-all, make test-names, make test-device, make test-versions, make test-mutations, make approve, make lint, make docs, make build, make bench, make gpu-evidence, make faults, make projects, make clean.
# Everything lives in .venv; nothing is installed twice.

PYTHON ?= python3
VENV ?= .venv
DEMO_OUT ?= demo_results
DEMO_ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2
FAULTS_ARGS ?=
GPU_ARGS ?=
VERSIONS ?=
VERSIONS_ARGS ?=
MUTATIONS_ARGS ?=
PROJECTS_ARGS ?=

BIN := $(VENV)/bin
# Python compiles each module at its first import, which is less work than to compile all that is installed.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
DEPENDS := pyproject.toml constraints.txt

# Idle threads sleep instead of spinning. On a machine that is busy with other things that is several times as fast.
export OMP_WAIT_POLICY ?= passive

# Who is told not to keep what is compiled compiles the tests anew in each worker, and the package in each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo compare test test-all test-names test-device test-versions test-mutations approve lint docs linkcheck build bench gpu-evidence faults projects clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(BIN)/python examples/digits.py --demo --out $(DEMO_OUT) $(DEMO_ARGS)

compare: $(VENV)/.demo
	@$(BIN)/python examples/compare_digits.py --out $(DEMO_OUT) $(DEMO_ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(TEST_ARGS)

# With the tests that take long and rarely fail: the examples, pages that measure, other people's projects.
test-all: $(VENV)/.test
	@$(BIN)/python -m pytest -n $(WORKERS) $(TEST_ARGS)

# What a Trainer runs, and an example, with the classes of `pytorch_lightning` in place of `lightning`.
test-names: $(VENV)/.test
	@$(BIN)/python tests/run_names.py -n $(WORKERS) $(TEST_ARGS) tests/promises tests/unit/callbacks

# What runs on a GPU or on any other accelerator, on devices that are only pretended; a C++ compiler builds them once.
DEVICE_TESTS := tests/gpu tests/unit tests/promises
test-device: $(VENV)/.test
	@$(BIN)/python tests/pretended/build.py
	@set -e; for kind in cuda pretended; do echo "--- $$kind"; \
	PYTHONPATH=tests/pretended/site LIGHTNING_AMP_PRETEND=$$kind \
	    $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" -p no:cacheprovider $(TEST_ARGS) $(DEVICE_TESTS); done

# make test-versions VERSIONS="python==3.12,torch==2.11.0,lightning==2.6.1 lowest,python==3.10"; without VERSIONS all of the table.
test-versions: $(VENV)/.versions
	@PYTHONPATH=tests $(BIN)/python -m versions --workers $(WORKERS) $(VERSIONS_ARGS) $(VERSIONS)

# Writes the printed texts in tests/approved anew; then read `git diff`.
approve: $(VENV)/.test
	@APPROVE=1 $(BIN)/python -m pytest -q -n $(WORKERS) $$(grep -rlE "assert_(approved|refused)" tests/unit)

# Plants a fault at a time in a copy of the package; each must make a test fail.
test-mutations: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python -m mutations $(MUTATIONS_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(if $(wildcard .github),$(BIN)/zizmor --offline --quiet .github)
	$(BIN)/python tests/check_pins.py
	$(BIN)/python -m pytest -q -n $(WORKERS) -p no:cacheprovider tests/prose/*.py
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation, into docs/_build/html; a warning is an error, and so is a link that leads nowhere. It is built anew each
# time, since Sphinx loses the index entries of unchanged pages from the search.
docs: $(VENV)/.docs
	@$(BIN)/python -m sphinx -b html --fresh-env --write-all --fail-on-warning --keep-going -q -j auto docs docs/_build/html
	@$(BIN)/python tests/check_site.py docs/_build/html

# The same for links to other sites; needs the network.
linkcheck: $(VENV)/.docs
	$(BIN)/python -m sphinx -b linkcheck -q docs docs/_build/linkcheck

build: $(VENV)/.build
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/check_dist.py

bench: $(VENV)/.test
	@set -e; files=$$(find tests/benchmarks -name '[!_]*.py' 2>/dev/null | sort); \
	if [ -z "$$files" ]; then echo "There are no benchmarks yet (tests/benchmarks is empty)."; fi; \
	for file in $$files; do $(BIN)/python -m $$(echo "$${file%.py}" | tr / .); done

# On a machine with a GPU, with the Python that is there: nothing is installed. GPU_ARGS=--tiny rehearses it on any machine.
gpu-evidence:
	@$(PYTHON) -m benchmarks.evidence $(GPU_ARGS)

faults: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python tests/faults/kill.py $(FAULTS_ARGS)

projects: $(VENV)/.projects
	@results=$$(mktemp -d); LIGHTNING_AMP_PROJECTS=$$results $(BIN)/python -m pytest -n $(WORKERS) $(PROJECTS_ARGS) \
	    tests/projects/test_projects.py; status=$$?; \
	$(if $(PROJECTS_ARGS),,PYTHONPATH=tests $(BIN)/python -m projects $$results docs/results/projects.md;) exit $$status

clean:
	rm -rf $(VENV) .versions demo_results comparison_results headline_tiny evidence_tiny claims_tiny docs/_build build dist .pytest_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "lightning_amp needs Python 3.10 or later, and $(PYTHON) is " + sys.version.split()[0] + ". Next step: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# The stamps are what makes a second call start at once; they are older than a changed pyproject.toml.
$(VENV)/.demo: $(DEPENDS) | $(VENV)/bin/python
	@echo "Installing the package, torch and Lightning into $(VENV): half a minute, longer where torch is downloaded."
	@$(PIP) -c constraints.txt -e '.[plot,report]' scikit-learn
	@touch $@

# `--group` needs pip 25.1. The tests need all that the demo needs.
$(VENV)/.test: $(DEPENDS) | $(VENV)/bin/python
	@echo "Installing the package and what its tests need into $(VENV): about a minute, longer where torch is downloaded."
	@$(PIP) 'pip>=25.1'
	@$(PIP) -c constraints.txt -e '.[plot,report,cli,fp8,examples]' --group test
	@touch $@ $(VENV)/.demo

$(VENV)/.lint: $(VENV)/.test
	@echo "Installing ruff, import-linter, pyright, zizmor and pip-audit into $(VENV)."
	@$(PIP) -c constraints.txt --group lint
	@touch $@

# The reference is read from the package, so it has to be importable with all that it takes for a demo.
$(VENV)/.docs: $(DEPENDS) | $(VENV)/bin/python
	@echo "Installing the package, Sphinx and Furo into $(VENV): about a minute, longer where torch is downloaded."
	@$(PIP) 'pip>=25.1'
	@$(PIP) -c constraints.txt -e '.[plot,report,cli]' --group docs
	@touch $@

$(VENV)/.build: $(DEPENDS) | $(VENV)/bin/python
	@echo "Installing build and twine into $(VENV)."
	@$(PIP) 'pip>=25.1'
	@$(PIP) -c constraints.txt --group build
	@touch $@

$(VENV)/.projects: $(VENV)/.test
	@echo "Installing other people's libraries into $(VENV), for the projects."
	@$(PIP) -c constraints.txt --group projects
	@touch $@

$(VENV)/.versions: $(DEPENDS) | $(VENV)/bin/python
	@$(PIP) 'pip>=25.1'
	@$(PIP) -c constraints.txt --group versions
	@touch $@
