# make demo, make test, make test-versions, make lint, make docs, make build, make bench, make faults, make projects, make clean.
# Everything lives in .venv; nothing is installed twice.

PYTHON ?= python3
VENV ?= .venv
DEMO_OUT ?= demo_results
DEMO_ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2
FAULTS_ARGS ?=
VERSIONS ?=
VERSIONS_ARGS ?=
PROJECTS_ARGS ?= --out docs/results/projects.md

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
DEPENDS := pyproject.toml constraints.txt

# Idle threads sleep instead of spinning. On a machine that is busy with other things that is several times as fast.
export OMP_WAIT_POLICY ?= passive

# Who is told not to keep what is compiled compiles the tests anew in each worker, and the package in each process.
unexport PYTHONDONTWRITEBYTECODE

