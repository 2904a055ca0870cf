# `make train`, `make demo`, `make quick`, `make test`: each builds .venv first. `make gpu`: docs/gpu.md. `make test-cuda`, `make test-te`: tests/nullcuda/README.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A run of config/$(1).py. One that Ctrl-C stopped has saved, and has not failed: 130 = 128 + SIGINT
RUN = $(BIN)/python train.py config/$(1).py $(if $(wildcard out/$(1)/ckpt/*[0-9]),--init_from=resume) || [ $$? -eq 130 ]

# Packages are installed uncompiled: a module is compiled when it is imported first, and that is kept
export PYTHONDONTWRITEBYTECODE =
INSTALL = $(BIN)/python -m pip install --quiet --no-compile -e .

# Two tests at a time, each on one core: most of them wait for processes of their own, or for files
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

.PHONY: train demo quick gpu test papers same-losses lint test-cuda test-te test-cuda-bench
train: $(VENV)/.installed data/stdlib/meta.json
	@$(call RUN,stdlib)

demo: $(VENV)/.installed data/stdlib/meta.json
	@$(call RUN,swap_demo)

quick: $(VENV)/.installed-dev
	$(PYTEST) -m 'not slow' tests

test: $(VENV)/.installed-dev lint
	$(PYTEST) tests

gpu:  # no environment: the machine's own python3, whatever torch it has
	$(PYTHON) -m bench.gpu_hour --out='$(or $(OUT),out/gpu_hour)'

papers: $(VENV)/.installed-dev data/stdlib/meta.json
	$(BIN)/python -m research.papers

same-losses: $(VENV)/.installed data/stdlib/meta.json
	$(BIN)/python -m bench.same_losses $(BASE) $(if $(ONE),--one)

test-cuda:
	tests/nullcuda/run.sh $(PYTHON) '$(TORCH)' tests

test-te:
	tests/nullcuda/run.sh $(PYTHON) '$(TORCH)' te

test-cuda-bench:
	tests/nullcuda/run.sh $(PYTHON) '$(TORCH)' bench

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

data/stdlib/meta.json: data/stdlib/prepare.py | $(VENV)/.installed
	$(BIN)/python data/stdlib/prepare.py

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memo needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: requirements.txt pyproject.toml | $(VENV)/.made
	$(INSTALL)
	touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt pyproject.toml | $(VENV)/.made
	$(INSTALL) -r requirements-dev.txt
	touch $(VENV)/.installed $@
