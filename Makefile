# Two commands do all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PYTEST := $(BIN)/pytest -n 2
EXAMPLES ?= 1000
SEED ?= $(shell date +%s)

.PHONY: demo test test-all fuzz tables lint types

demo: $(STAMP)
	$(BIN)/gtpgraph demo

test: lint types
	$(PYTEST) -m "not slow and not gpu and not multi_gpu"

test-all: lint types
	$(PYTEST)

# Random programs; make fuzz SEED=n runs the same ones again.
fuzz: $(STAMP)
	GTPGRAPH_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/pytest tests/fuzz --timeout 0 \
		--hypothesis-seed=$(SEED) --hypothesis-show-statistics

# The README's tables, from the rows in bench/results.
tables: $(STAMP)
	$(BIN)/python bench/tables.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The stamp is newer than what it was made from, or the environment is brought up to date.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@
