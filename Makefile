# make setup | build | demo | demo-faults | test | test-slow | test-thorough | coverage | lint | format | docs | docs-serve | bench | pages | chaos | peers | ft-test | test-clients | conformance | compat | dry-run | cuda-build | cuda-test | wheel | wheel-test | clean
# Everything runs in .venv, created on first use; the system only provides Python (with venv), g++ and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PEERS_VENV := .venv-peers
PEERS_PY := $(PEERS_VENV)/bin/python
FT_VENVS := .venv-ft .venv-ft-nightly
CUDA_VENV := .venv-cuda
CUDA_PY := $(CUDA_VENV)/bin/python
CUDA_OUT := build/cuda-package
# Python's bundled pip is too old for the dependency groups in pyproject.toml. Keep in sync with .github/workflows/release.yml.
PIP := pip==26.3
ARGS ?=

CMAKE := $(VENV)/bin/cmake
CTEST := $(VENV)/bin/ctest --output-on-failure --no-tests=error --parallel 2
CPP_FILES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# In CI warnings are errors (setup.py and the C++ tests read this).
ifeq ($(CI),true)
export TORCHDDP_WERROR ?= 1
endif
TORCHDDP_WERROR ?= 0

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help setup build cpp-tests demo demo-faults test test-slow test-thorough coverage lint format docs docs-serve bench pages chaos peers ft-test test-clients conformance compat dry-run dry-python cuda-build cuda-test clean
.PHONY: wheel wheel-cpu wheel-cuda wheel-test wheel-test-cpu wheel-test-cuda

help:
	@sed -n '1,2s/^# //p' Makefile

# --- environment -----------------------------------------------------------------------------------------------------

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Python 3 was not found; set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.requirements: $(VENV)/.created pyproject.toml
	$(PY) -m pip install -q $(PIP)
	$(PY) -m pip install -q --group dev
	@touch $@

# The editable installation happens once; later builds go through `make build`.
$(VENV)/.installed: $(VENV)/.requirements setup.py
	$(PY) -m pip install -q --no-build-isolation --no-deps --editable .
	@touch $@

setup: $(VENV)/.installed

# --- build, test, lint -----------------------------------------------------------------------------------------------

build: setup
	@$(PY) setup.py -q build_ext --inplace

# Tests of the torch-free folders: optimized as shipped, under AddressSanitizer and UndefinedBehaviorSanitizer, and, for
# multi-threaded ones, under ThreadSanitizer.
CPP_SANITIZERS ?= none address,undefined thread
cpp-tests: setup
	@for sanitize in $(CPP_SANITIZERS); do \
	  sanitize=$${sanitize#none}; \
	  dir=build/cpp-tests$${sanitize:+-$${sanitize%%,*}}; \
	  grep -qsx "CMAKE_HOME_DIRECTORY:INTERNAL=$(CURDIR)" $$dir/CMakeCache.txt || rm -rf $$dir; \
	  echo "C++ tests$${sanitize:+ under $$sanitize}"; \
	  $(CMAKE) -S . -B $$dir -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	    -DTORCHDDP_BUILD_EXTENSION=OFF -DTORCHDDP_BUILD_TESTS=ON -DTORCHDDP_SANITIZE=$$sanitize \
	    -DTORCHDDP_WERROR=$(TORCHDDP_WERROR) && \
	  $(CMAKE) --build $$dir && $(CTEST) --test-dir $$dir || exit 1; \
	done

# Tests run in parallel, because most spend half of their time waiting for other ranks. TEST_JOBS=0 runs them serially, for a
# debugger. A failed test is rerun once and listed in the summary (RERUN); in CI it counts as failed.
TEST_JOBS ?= 2
TEST_RERUNS ?= 1
PYTEST = -m pytest -q -n $(TEST_JOBS) --dist worksteal --reruns $(TEST_RERUNS) --reruns-delay 2 -rR

# C++ tests with these sanitizers, then Python tests with these markers, whether or not the former passed.
comma := ,
define run-tests
@$(MAKE) --no-print-directory cpp-tests CPP_SANITIZERS="$(1)"; cpp=$$?; \
$(PY) $(PYTEST) -m "$(2)" $(ARGS); python=$$?; \
[ $$cpp = 0 ] || echo "C++ tests failed: see above"; \
[ $$cpp = 0 ] && [ $$python = 0 ]
endef

# About eight minutes on two cores, C++ tests included. `.ci/run` also runs test-slow; run test-thorough (full benchmarks and other
# commands, further parameters, mutants) after changing the code that it tests.
test: build
	$(call run-tests,none,not slow and not thorough)

# One more job, because most of these tests wait.
test-slow: TEST_JOBS = 3
test-slow: build
	$(call run-tests,address$(comma)undefined thread,slow and not thorough)

test-thorough: build
	$(PY) $(PYTEST) -m thorough $(ARGS)

# Lines of torchddp/ that these tests reach, in the ranks that they fork and the programs that they start too. Fails below the floor in
# pyproject.toml. Measuring takes half as much time again, so `make test` does without; COVERED=tests measures all of its tests.
COVERED ?= tests/unit tests/spec tests/parity
coverage: build
	@rm -rf build/coverage && mkdir -p build/coverage
	$(PY) -m coverage run $(PYTEST) -m "not slow and not thorough" $(COVERED) $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) scripts/check_stubs.py

format: setup
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

# --- the docs site, in build/site: needs neither a build nor torch ----------------------------------------------------------

DOCS_VENV := .venv-docs
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs

$(DOCS_VENV)/.requirements: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q $(PIP)
	$(DOCS_VENV)/bin/python -m pip install -q --group docs
	@touch $@

# Not with --quiet, which would hide warnings from --strict.
docs: $(DOCS_VENV)/.requirements
	$(MKDOCS) build $(ARGS)

docs-serve: $(DOCS_VENV)/.requirements
	$(MKDOCS) serve $(ARGS)

# --- what the project does -------------------------------------------------------------------------------------------

demo: build
	$(PY) -m examples.demo $(ARGS)

demo-faults: build
	$(PY) -m examples.demo_faults $(ARGS)

bench: build
	$(PY) -m benchmarks $(ARGS)

# docs/images/cost_of_ddp.png, from the newest result of the case `exposed` in benchmarks/results.
pages: build
	$(PY) -m benchmarks.pages

# 300 faults at random points of training jobs: docs/chaos.md.
chaos: build
	$(PY) -m benchmarks --case chaos $(ARGS)

# An environment with peer packages for sharding ($(PEERS_PY) -m benchmarks --case sharded) and for reducing among the ranks of a host
# ($(PEERS_PY) -m benchmarks --case collective). It uses the checkout's extension.
$(PEERS_VENV)/.requirements: pyproject.toml
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_PY) -m pip install -q $(PIP)
	$(PEERS_PY) -m pip install -q --group build --group test
	DS_BUILD_OPS=0 $(PEERS_PY) -m pip install -q --no-build-isolation --group peers
	@echo "$(CURDIR)" > "$$($(PEERS_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchddp.pth"
	@touch $@

peers: build $(PEERS_VENV)/.requirements
	$(PEERS_PY) -c "import fairscale, deepspeed"

# All torchft tests, slow ones included, with torchft's release and its nightly. They use the checkout's extension.
$(FT_VENVS:%=%/.requirements): .venv-%/.requirements: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q $(PIP)
	.venv-$*/bin/python -m pip install -q --group build --group test --group $*
	@touch $@

FT_TESTS := tests/distributed/test_fault_tolerance.py tests/fault/test_torchft.py tests/unit/test_fault_tolerance.py
ft-test: build $(FT_VENVS:%=%/.requirements)
	for venv in $(FT_VENVS); do $$venv/bin/python -m pytest -q $(FT_TESTS) $(ARGS) || exit 1; done

# torchddp in frameworks that train with DDP, each in its own environment on top of .venv, whose packages it sees (above all torch)
# unless it has its own version of them. They use the checkout's extension.
CLIENTS ?= lightning accelerate composer engines trl ray spark
$(CLIENTS:%=.venv-%/.requirements): .venv-%/.requirements: pyproject.toml $(VENV)/.installed
	$(PYTHON) -m venv .venv-$*
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	.venv-$*/bin/python -m pip install -q $(PIP)
	.venv-$*/bin/python -m pip install -q --group $*
	if grep -q '^$*-no-deps = ' pyproject.toml; then .venv-$*/bin/python -m pip install -q --no-deps --group $*-no-deps; fi
	@touch $@

test-clients: build $(CLIENTS:%=.venv-%/.requirements)
	for client in $(CLIENTS); do .venv-$$client/bin/python -m pytest -q tests/clients/test_$$client*.py $(ARGS) || exit 1; done

conformance: build
	$(PY) scripts/check_conformance.py --jobs 2 $(ARGS)

# Compile the sources against the headers of the oldest and the newest supported torch; nothing is linked.
compat: build
	$(PY) -m scripts.check_compat $(ARGS)

# tests/gpu/run.sh without a GPU, in a copy of the checkout, with the Python and the torch of a machine that has one: build,
# imports, tests and benchmarks. Needs Python 3.12; an inactive pyenv version will do.
DRY_PYTHON ?= $(shell PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep -m 1 '^3\.12') \
  python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
DRY_VENV := .venv-dry

$(DRY_VENV)/.requirements: pyproject.toml
	$(DRY_PYTHON) -m venv $(DRY_VENV)
	$(DRY_VENV)/bin/python -m pip install -q $(PIP)
	$(DRY_VENV)/bin/python -m pip install -q --group dry
	@touch $@

dry-python:
	@echo $(DRY_PYTHON)

dry-run: $(if $(DRY_PYTHON),$(DRY_VENV)/.requirements)
	$(if $(DRY_PYTHON),$(DRY_VENV)/bin/python scripts/gpu_dry_run.py $(ARGS),@echo "dry-run: skipped, Python 3.12 was not found")

# --- the CUDA variant: compiled, linked and imported; a GPU is not needed ----------------------------------------------

$(CUDA_VENV)/.requirements: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_PY) -m pip install -q $(PIP)
	$(CUDA_PY) -m pip install -q --group cuda --group test
	@touch $@

cuda-build: $(CUDA_VENV)/.requirements
	@rm -rf $(CUDA_OUT)
	TORCHDDP_CUDA=1 $(CUDA_PY) setup.py -q build --build-lib $(CUDA_OUT)
	cd $(CUDA_OUT) && ../../$(CUDA_PY) -c \
	  "import torchddp, torchddp._C as c; print('imported', c.__file__, 'torchddp', torchddp.__version__)"
	$(CUDA_PY) -m scripts.check_symbols $(CUDA_OUT)/torchddp/_C*.so
	$(CUDA_PY) -m scripts.check_cuda_binary $(CUDA_OUT)/torchddp/_C*.so --build-dir build/cuda
	$(CUDA_PY) -m scripts.check_cuda_spills --build-dir build/cuda

# Tests CPU models with the CUDA build, in its own tree because the checkout holds the CPU build. The default tests cover code that
# the CUDA build compiles differently; others work too: make cuda-test CUDA_TESTS=tests/distributed.
CUDA_TESTS ?= tests/parity/test_training.py tests/distributed/test_transport.py tests/unit/test_build_check.py \
  tests/unit/test_nccl_setup.py
cuda-test: cuda-build
	cp -r tests examples benchmarks scripts pyproject.toml $(CUDA_OUT)
	cd $(CUDA_OUT) && ../../$(CUDA_PY) $(PYTEST) -p no:cacheprovider -m "not slow and not thorough" $(CUDA_TESTS) $(ARGS)

# --- wheels, in dist/: VARIANT=cpu or VARIANT=cuda; default: both with nvcc ---------------------------------------------

NVCC := $(shell command -v nvcc)
VARIANT ?= cpu $(if $(NVCC),cuda)

$(VENV)/.wheel-requirements: $(VENV)/.requirements
	$(PY) -m pip install -q --group wheel
	@touch $@

wheel: $(VARIANT:%=wheel-%)
	@test -n "$(NVCC)" || echo "no nvcc: the CUDA wheel was not built"

wheel-cpu: setup $(VENV)/.wheel-requirements
	$(PY) -m scripts.build_wheel

wheel-cuda: $(CUDA_VENV)/.requirements $(VENV)/.wheel-requirements
	$(CUDA_PY) -m scripts.build_wheel --tools-dir $(VENV)/bin

# Install each wheel from an index into a new environment, away from the checkout.
wheel-test: $(VARIANT:%=wheel-test-%)

wheel-test-cpu: wheel-cpu
	$(PY) -m scripts.test_wheel dist/torchddp-*+cpu.torch*.whl --torch "$$(sed -n 's/^torch = \["\(.*\)"\]$$/\1/p' pyproject.toml)"

wheel-test-cuda: wheel-cuda
	$(CUDA_PY) -m scripts.test_wheel dist/torchddp-*+cu[0-9]*.torch*.whl --torch-of $(CURDIR)/$(CUDA_PY)

clean:
	rm -rf build dist *.egg-info torchddp/_C*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed
