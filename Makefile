# make demo and make test work on a fresh machine with Python 3.10 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint compile verify ci clean

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[test]' -c constraints.txt
	touch $@

demo: $(BIN)/.installed
	$(BIN)/adatom demo

test: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(BIN)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

compile: $(BIN)/.installed
	$(BIN)/adatom compile --quick

verify: $(BIN)/.installed
	$(BIN)/adatom verify --quick

ci:
	.ci/run

clean:
	rm -rf .venv build dist *.egg-info
