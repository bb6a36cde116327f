# Two commands: `make demo` and `make test`. Each makes .venv and installs on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# For the CPU build of vLLM: KV cache in GiB (its own default fails on small machines).
export VLLM_CPU_KVCACHE_SPACE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# An editable install in this venv only.
unexport PYTHONPATH

.PHONY: help demo test bench lint format install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    a real model on vLLM detects prompt injections from its own attention"
	@echo "make test    everything that CI runs: lint, types, import contracts, all tests"
	@echo "make bench   what observation costs, against plain vLLM and Hugging Face"
	@echo "make lint    ruff, mypy and import contracts only"
	@echo "make format  let ruff rewrite the code"
	@echo "make clean   remove .venv, caches and out/"

$(STAMP): pyproject.toml scripts/repair_torchvision.py
	@echo "installing into $(VENV) (once, about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -e '.[cpu,demo,dev]'
	@$(BIN)/python scripts/repair_torchvision.py
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/vllm-hook demo

bench: $(STAMP)
	@$(BIN)/vllm-hook bench

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m vllm_hook.demo.model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
