# make serve [MODEL=folder, GGUF file or hub id] [ARGS="--port 9000 ..."]   set up, then serve (a demo model without MODEL)
# make test                                                               set up, then every test that needs no GPU
# make test-page                                                          the status page in Chromium, where there is one
# make lint, make test-cpp                                                the checks of .ci/run one by one
# make fuzz [FUZZ_SECONDS=...]                                            fuzz the scheduler's calls, with clang
# make soak                                                               20,000 requests, many ill-behaved; then nothing may be left of them
# make schemathesis                                                       try out what /openapi.json promises, for long
# make setup                                                              only set up; `make clean` undoes it
#
# Set-up is plain venv and pip in .venv. A stamp file remembers it, so a second run starts at once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: serve test test-page lint test-cpp test-threads fuzz soak schemathesis setup clean

MODEL ?=
ARGS ?=
DEMO := smollm2-135m
CLANG := clang++-14
FUZZ_SECONDS := 30

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
	$(PYTHON) -m pytest --ignore=tests/gpu -m "not gpu and not long and not browser" --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)
	echo "The status page is tested in a browser by \`make test-page\`, which needs Chromium."

test-page: $(INSTALLED)
	$(PYTHON) -m pytest -m browser tests/serve $(ARGS)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.ci/type-tree
	$(PYTHON) -m pyright --pythonpath $(PYTHON) | sed 's|$(CURDIR)/build/types/||'

CONFIGURE_CPP := .venv/bin/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/.venv/bin/ninja" -DTOKENSPEED_BUILD_TESTS=ON
HAS_CLANG := $(shell command -v $(CLANG))
# One build for the tests and the fuzzers, where there is a compiler that has libFuzzer.
FUZZER := $(if $(HAS_CLANG),-DCMAKE_CXX_COMPILER=$(CLANG) -DTOKENSPEED_LIBFUZZER=ON)

.build/cpp/.configured: scheduler_cpp/CMakeLists.txt | $(INSTALLED)
	$(CONFIGURE_CPP) -B .build/cpp -DTOKENSPEED_SANITIZE=address -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 $(FUZZER)
	touch $@

test-cpp: .build/cpp/.configured test-threads $(if $(HAS_CLANG),fuzz)
	.venv/bin/cmake --build .build/cpp --parallel "$$(nproc)"
	.venv/bin/ctest --test-dir .build/cpp/scheduler_cpp --output-on-failure --no-tests=error

# What only several threads can break, under ThreadSanitizer.
test-threads: $(INSTALLED)
	$(CONFIGURE_CPP) -B .build/threads -DTOKENSPEED_SANITIZE=thread -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1
	.venv/bin/cmake --build .build/threads --parallel "$$(nproc)" --target exclusive_test
	.venv/bin/ctest --test-dir .build/threads/scheduler_cpp --label-regex threads --output-on-failure --no-tests=error

# libFuzzer from the committed seeds; what it finds beyond them stays in .build/fuzz for the next run.
fuzz: .build/cpp/.configured
	.venv/bin/cmake --build .build/cpp --parallel "$$(nproc)" --target call_sequence_fuzz
	mkdir -p .build/fuzz/corpus
	.build/cpp/scheduler_cpp/call_sequence_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=1500 -timeout=20 \
	  -print_final_stats=1 -artifact_prefix=.build/fuzz/ .build/fuzz/corpus scheduler_cpp/tests/seeds/call_sequence

soak: $(INSTALLED)
	$(PYTHON) -m pytest -m long --capture=no tests/e2e/test_soak.py $(ARGS)

schemathesis: $(INSTALLED)
	$(PYTHON) -m pytest -m long tests/serve/test_openapi.py $(ARGS)

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
