# make serve [MODEL=folder, GGUF file or hub id] [ARGS="--port 9000 ..."]   set up, then serve (a demo model without MODEL)
# make test                                                               set up, then every test that needs no GPU
# make lint, make test-cpp                                                the checks of .ci/run one by one
# make setup                                                              only set up; `make clean` undoes it
#
# Set-up is plain venv and pip in .venv. A stamp file remembers it, so a second run starts at once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: serve test lint test-cpp setup clean

MODEL ?=
ARGS ?=
DEMO := smollm2-135m

PYTHON := .venv/bin/python
PIP_INSTALL := $(PYTHON) -m pip install --disable-pip-version-check
INSTALLED := .venv/.installed
DEPENDENCIES := .venv/.dependencies
# An editable install sees changed Python files by itself; compiled code has to be built again.
BUILD_INPUTS := CMakeLists.txt $(shell find scheduler_cpp -name '*.cpp' -not -path '*/tests/*' -o -name '*.h' -not -path '*/tests/*' -o -name CMakeLists.txt)
# JAX for CUDA comes along where there is a GPU.
EXTRAS := test$(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda)

serve: $(INSTALLED)
ifeq ($(MODEL),)
	model="$$($(PYTHON) -m tokenspeed_jax.weights.demo $(DEMO) | tail -n 1)"
	exec $(PYTHON) -m tokenspeed_jax.serve --model "$$model" $(ARGS)
else
	exec $(PYTHON) -m tokenspeed_jax.serve --model "$(MODEL)" $(ARGS)
endif

test: $(INSTALLED)
	$(PYTHON) -m pytest --ignore=tests/gpu -m "not gpu" --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.ci/type-tree
	$(PYTHON) -m pyright --pythonpath $(PYTHON) | sed 's|$(CURDIR)/build/types/||'

test-cpp: $(INSTALLED)
	.venv/bin/cmake -S . -B .build/cpp -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/.venv/bin/ninja" \
	  -DTOKENSPEED_SANITIZE=ON -DTOKENSPEED_BUILD_TESTS=ON
	.venv/bin/cmake --build .build/cpp --parallel "$$(nproc)"
	.venv/bin/ctest --test-dir .build/cpp/scheduler_cpp --output-on-failure --no-tests=error

setup: $(INSTALLED)

$(PYTHON):
	python="$$(.ci/find-python)"
	echo "Using $$python ($$("$$python" --version))"
	"$$python" -m venv .venv

# The build tools live in .venv too, so that a change of the C++ sources is built again without asking any index.
$(DEPENDENCIES): pyproject.toml | $(PYTHON)
	$(PIP_INSTALL) "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.25" "ninja>=1.11"
	$(PIP_INSTALL) --no-build-isolation -e ".[$(EXTRAS)]"
	touch $@

$(INSTALLED): $(BUILD_INPUTS) $(DEPENDENCIES)
	$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf .venv build .build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
