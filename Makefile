# Two commands: `make train` and `make test`. Both build .venv from requirements first. `make test-cuda`: tests/nullcuda/README.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test lint test-cuda test-cuda-bench
train: $(VENV)/.installed data/stdlib/meta.json
	$(BIN)/python train.py config/stdlib.py $(if $(wildcard out/stdlib/ckpt/*[0-9]),--init_from=resume)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -q tests

test-cuda:
	tests/nullcuda/run.sh $(PYTHON) '$(TORCH)' tests

test-cuda-bench:
	tests/nullcuda/run.sh $(PYTHON) '$(TORCH)' bench

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

data/stdlib/meta.json: data/stdlib/prepare.py | $(VENV)/.installed
	$(BIN)/python data/stdlib/prepare.py

$(VENV)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memo needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@
