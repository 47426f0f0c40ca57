# Two commands for a machine with Python >= 3.11, pip and make:
#
#   make demo    the whole way: train, compare, merge a small model
#   make test    lint, types, every test; what CI runs
#   make test-long    longer forms of some tests
#   make browser the pages of vox data preview and vox serve, in a Chromium that is on the path
#   make crash   kill -9 over runs of a tiny model, N=50 times, and at every call to the disk
#   make fuzz    what reads files and bodies of requests, on CASES=20000 made-up ones each
#   make bench   vox's training against its peers; QUICK=1 ends in a quarter of an hour
#
# PYTHON=python3.12 chooses the interpreter; PYTEST_ARGS="-k merge" goes to pytest.

PYTHON ?= python3
PYTEST_ARGS ?=

# Where it is set, every process would compile what it imports anew, torch as well.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
BLAS := $(if $(filter Linux,$(shell uname -s)),$(CURDIR)/$(VENV)/blas.so)
# Twice quiet: errors only. The constraints go with every call, so that pip never takes another torch.
# What is imported is compiled then: a fifth of what is installed is, and pip would compile all of it.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
	-c constraints.txt

# Every test process keeps to one thread, and there is one process more than cores, up to five
# (conftest.py): the tests' models are tiny, and more would only get in each other's way.
#
# MLX's wheel for Linux has a reference BLAS, which would take the MLX tests from minutes to hours.
#
# PEFT imports bitsandbytes, which compiles functions with torch's compiler unless that is disabled.
PYTEST := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 VOX_MLX_BLAS=$(BLAS) TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-long browser crash fuzz style lint bench clean

help:
	@echo "make demo    train, compare and merge a small model, in an environment of its own"
	@echo "make test    lint, types and every test"
	@echo "make test-long    longer forms of some tests"
	@echo "make browser the pages of vox data preview and vox serve, in a Chromium that is on the path"
	@echo "make crash   kill runs of a tiny model N=50 times, and at every call to the disk"
	@echo "make fuzz    what reads files and bodies of requests, on CASES=20000 made-up ones each"
	@echo "make lint    lint and types only"
	@echo "make bench   vox's training against its peers, for hours; QUICK=1 for a quarter of one"
	@echo "make clean   remove .venv and what tools left behind"

demo: $(VENV)/.installed
	@$(BIN)/vox quickstart

# mypy is one of the tests (tests/architecture/test_types.py), so that it runs beside the others.
test: style $(BLAS)
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

test-long: style $(BLAS)
	$(PYTEST) -m long $(PYTEST_ARGS)

browser: $(VENV)/.installed-dev
	$(PYTEST) -n 0 -m '' tests/browser

# Some seconds a kill. With strace on the machine, every system call of a checkpoint in turn, too.
N ?= 50
SEED ?= 0
crash: $(VENV)/.installed-dev
	$(PYTEST) -n 0 -m '' tests/run/test_killed.py
	$(BIN)/python tests/run/random_kills.py $(N) $(SEED)
	$(BIN)/python tests/run/random_kills.py $(N) $(SEED) --grpo

# Others each time; `make test` looks at 200 each, the same ones every time.
CASES ?= 20000
fuzz: $(VENV)/.installed-dev
	VOX_FUZZ=$(CASES) $(PYTEST) --dist load --timeout 3600 tests/fuzz plugins/vox_serve/tests/test_fuzz.py

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

# The peers are installed beside vox: what is compared are trainers, on the same torch.
bench: $(VENV)/.installed-bench $(BLAS)
	@$(BIN)/vox model pull smollm2-135m
	$(BIN)/python -m benchmarks.dpo_speed --trl $(BIN)/python $(if $(QUICK),--rounds 1 --steps 2 --quick) --out benchmarks/results/dpo$(if $(QUICK),-quick).md
	VOX_MLX_BLAS=$(BLAS) $(BIN)/python -m benchmarks.training $(if $(QUICK),--quick --name cpu-quick)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .hypothesis build dist
	find . -type d \( -name __pycache__ -o -name .ruff_cache \) -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vox needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "making $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# OpenBLAS comes as a Python package whose names all begin with scipy_: a shim gives MLX the one
# that it calls.
$(CURDIR)/$(VENV)/blas.so: $(VENV)/.installed-dev tools/blas_shim.c
	@folder=$$($(BIN)/python -c 'import scipy_openblas32 as b; print(b.get_lib_dir())') && \
		$(CC) -O2 -shared -fPIC tools/blas_shim.c -o $@ \
		-L$$folder -lscipy_openblas -Wl,-rpath,$$folder

PROJECTS := $(wildcard pyproject.toml libs/*/pyproject.toml plugins/*/pyproject.toml) requirements.txt

# The build backend comes first: an environment to build each of 22 packages in takes half a minute.
$(VENV)/.installed: $(VENV)/.made $(PROJECTS) constraints.txt
	@echo "installing torch and vox into $(VENV) … this takes a few minutes"
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_INSTALL) --no-build-isolation -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools for tests …"
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]' -e libs/vox_testing -e 'plugins/vox_runs[plot]' -e plugins/vox_cuda -e plugins/vox_mlx \
		-e plugins/vox_tensorboard -e plugins/vox_tinker -e plugins/vox_wandb
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev benchmarks/requirements.txt
	@echo "installing the peers for the benchmark …"
	@$(PIP_INSTALL) -r benchmarks/requirements.txt
	@touch $@
