# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, made on first use with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TESTS ?= tests

.PHONY: demo test check format dev wheel-check bench docs triton-server clean

demo: $(VENV)/run.stamp  ## a small language model: prepare, export, answer with and without speculation
	$(BIN)/python examples/smollm2/demo.py

test: $(VENV)/triton.stamp  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

check: $(VENV)/dev.stamp  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dev: $(VENV)/dev.stamp  ## virtual environment for development

wheel-check: $(VENV)/dev.stamp  ## build the wheel, install it in a fresh environment, import everything
	$(BIN)/python -m pytest -q tests/packaging -m slow

bench: $(VENV)/dev.stamp  ## the promised speeds, measured on this machine
	$(BIN)/python benchmarks/judged.py

docs: $(VENV)/dev.stamp  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

triton-server: $(VENV)/triton.stamp  ## NVIDIA's server, which tests/serving/test_triton.py runs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[cpu,export,serve,smollm2]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) -e '.[dev]'
	# The Python layer of TensorRT 11, over the RTX library in tests; its own libraries need a GPU machine.
	$(PIP) --no-deps tensorrt-cu13-bindings
	touch $@

# 75 MB. The server asks for older libraries than ours: it gets none of them, but a NumPy of its own in a folder of its
# own. Its wheel is for Linux on x86-64; elsewhere pip finds nothing, and its tests are skipped.
$(VENV)/triton.stamp: $(VENV)/dev.stamp
	-$(PIP) --no-deps nvidia-pytriton tritonclient python-rapidjson && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --upgrade \
	  --target $(VENV)/numpy-1 'numpy==1.26.4' && \
	touch $@

clean:
	rm -rf $(VENV) .demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache
