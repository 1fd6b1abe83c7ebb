# `make` or `make help` lists what can be made and, where it was measured, about how long it takes on two cores after the first build.
# Everything runs in .venv, created on first use; the system only provides Python (with venv), g++ and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PEERS_VENV := .venv-peers
PEERS_PY := $(PEERS_VENV)/bin/python
FT_VENVS := .venv-ft .venv-ft-nightly
TORCH_CUDA := 13.0
CUDA_VENV := .venv-cuda-$(TORCH_CUDA)
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
.PHONY: help setup build cpp-tests simulated-gpu demo demo-faults test test-slow test-thorough asan coverage lint format docs docs-serve bench pages chaos
.PHONY: peers ft-test test-clients conformance dry-run dry-python cuda-build cuda-test wheel wheel-all wheel-test wheel-test-all lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' Makefile

# --- environment -----------------------------------------------------------------------------------------------------

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Python 3 was not found; set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.requirements: $(VENV)/.created pyproject.toml requirements/dev.txt
	$(PY) -m pip install -q $(PIP)
	$(PY) -m pip install -q --group dev -c requirements/dev.txt
	@touch $@

# The editable installation happens once; later builds go through `make build`.
$(VENV)/.installed: $(VENV)/.requirements setup.py
	$(PY) -m pip install -q --no-build-isolation --no-deps --editable .
	@touch $@

setup: $(VENV)/.installed ## .venv and the compiled extension (about 3 min the first time)

# --- build, test, lint -----------------------------------------------------------------------------------------------

build: setup ## compile what has changed (2 s if nothing has)
	@$(PY) setup.py -q build_ext --inplace

# Tests of the torch-free folders: optimized as shipped, under AddressSanitizer and UndefinedBehaviorSanitizer, and, for
# multi-threaded ones, under ThreadSanitizer.
CPP_SANITIZERS ?= none address,undefined thread
cpp-tests: setup ## C++ tests, also under sanitizers (5 min)
	@for sanitize in $(CPP_SANITIZERS); do \
	  sanitize=$${sanitize#none}; \
	  dir=build/cpp-tests$${sanitize:+-$${sanitize%%,*}}; \
	  grep -qsx "CMAKE_HOME_DIRECTORY:INTERNAL=$(CURDIR)" $$dir/CMakeCache.txt || rm -rf $$dir; \
	  echo "C++ tests$${sanitize:+ under $$sanitize}"; \
	  $(CMAKE) -S . -B $$dir -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	    -DTORCHDDP_BUILD_EXTENSION=OFF -DTORCHDDP_BUILD_TESTS=ON -DTORCHDDP_SANITIZE=$$sanitize \
	    -DTORCHDDP_WERROR=$(TORCHDDP_WERROR) && \
	  $(CMAKE) --build $$dir && $(CTEST) --test-dir $$dir $(CTEST_ARGS) || exit 1; \
	done

# Tests run in parallel, three on two cores, because most spend half of their time waiting for other ranks. TEST_JOBS=0 runs them
# serially, for a debugger. A failed test is rerun once and listed in the summary (RERUN); in CI it counts as failed.
TEST_JOBS ?= 3
TEST_RERUNS ?= 1
PYTEST = -m pytest -q -n $(TEST_JOBS) --dist worksteal --reruns $(TEST_RERUNS) --reruns-delay 2 -rR --durations 5

# C++ tests with these sanitizers, then Python tests with these markers, whether or not the former passed; and options of ctest.
comma := ,
define run-tests
@$(MAKE) --no-print-directory cpp-tests CPP_SANITIZERS="$(1)" CTEST_ARGS="$(3)"; cpp=$$?; \
$(PY) $(PYTEST) -m "$(2)" $(ARGS); python=$$?; \
[ $$cpp = 0 ] || echo "C++ tests failed: see above"; \
[ $$cpp = 0 ] && [ $$python = 0 ]
endef

# tests/simgpu runs the reducer on it. Compiles its own sources only; the others are those of `make build`.
simulated-gpu: build
	@$(VENV)/bin/cmake --build build/cpu --target simulated_gpu >build/simulated_gpu.log || { cat build/simulated_gpu.log; exit 1; }

# `.ci/run` also runs test-slow; run test-thorough (full benchmarks and other
# commands, further parameters, mutants) after changing the code that it tests.
test: build simulated-gpu ## C++ and Python tests (8 min)
	$(call run-tests,none,not slow and not thorough)

test-slow: build simulated-gpu ## tests that take longer, C++ tests under sanitizers (8 min)
	$(call run-tests,address$(comma)undefined thread,slow and not thorough)

test-thorough: build simulated-gpu ## whole commands, further parameters, mutants, the deep search of shared memory (longer than an hour)
	$(call run-tests,none,thorough,-C thorough -L thorough)

# The extension under AddressSanitizer, in a copy of the sources; without the tests that limit or measure memory.
ASAN_TESTS ?= tests/spec tests/parity tests/distributed tests/fault
ASAN_FLAGS := -fsanitize=address -fno-omit-frame-pointer -g1
asan: setup ## tests of the extension under AddressSanitizer (20 min)
	@mkdir -p build/asan && git ls-files | tar -c -T - | tar -x -C build/asan
	cd build/asan && CXXFLAGS="$(ASAN_FLAGS)" LDFLAGS=-fsanitize=address TORCHDDP_CUDA=0 $(CURDIR)/$(PY) setup.py -q build_ext --inplace
	cd build/asan && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" PYTHONPATH=. PYTHONMALLOC=malloc \
	  ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:exitcode=99 $(CURDIR)/$(PY) -m pytest -q -n 2 -p no:cacheprovider \
	  -m "not slow and not thorough" -k "not no_second_copy and not without_memory and not without_shared_memory" $(ASAN_TESTS) $(ARGS)

# Lines of torchddp/ that these tests reach, in the ranks that they fork and the programs that they start too. Fails below the floor in
# pyproject.toml. Measuring takes half as much time again, so `make test` does without; COVERED=tests measures all of its tests.
COVERED ?= tests/unit tests/spec tests/parity tests/distributed/test_comm_hooks.py tests/distributed/test_muon.py tests/distributed/test_oss.py
coverage: build ## lines of torchddp/ that the tests reach (5 min)
	@rm -rf build/coverage && mkdir -p build/coverage
	$(PY) -m coverage run $(PYTEST) -m "not slow and not thorough" $(COVERED) $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report

lint: build ## ruff, mypy, clang-format, stubs (30 s)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	@$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) scripts/check_stubs.py
	@! git grep -nE '^(<<<<<<<|>>>>>>>) '  # of a merge

format: setup ## fix what lint finds in the layout (10 s)
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

# --- the docs site, in build/site: needs neither a build nor torch ----------------------------------------------------------

DOCS_VENV := .venv-docs
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs

$(DOCS_VENV)/.requirements: pyproject.toml requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q $(PIP)
	$(DOCS_VENV)/bin/python -m pip install -q --group docs -c requirements/docs.txt
	@touch $@

# Not with --quiet, which would hide warnings from --strict.
docs: $(DOCS_VENV)/.requirements ## the site, in build/site (10 s)
	$(MKDOCS) build $(ARGS)

docs-serve: $(DOCS_VENV)/.requirements ## the site on localhost:8000, until Ctrl-C
	$(MKDOCS) serve $(ARGS)

# --- what the project does -------------------------------------------------------------------------------------------

demo: build ## train on two ranks, and compare with torch DDP (2 min)
	$(PY) -m examples.demo $(ARGS)

demo-faults: build ## kill a rank and let torchrun restart it (1 min)
	$(PY) -m examples.demo_faults $(ARGS)

bench: build ## torchddp beside torch DDP: ARGS="--case ..." (2 min a case)
	$(PY) -m benchmarks $(ARGS)

# docs/images/cost_of_ddp.png, from the newest result of the case `exposed` in benchmarks/results.
pages: build ## the chart of the README, from measured results (10 s)
	$(PY) -m benchmarks.pages

# 300 faults at random points of training jobs: docs/testing.md.
chaos: build ## 300 faults at random points of training (hours)
	$(PY) -m benchmarks --case chaos $(ARGS)

# An environment with peer packages for sharding ($(PEERS_PY) -m benchmarks --case sharded) and for reducing among the ranks of a host
# ($(PEERS_PY) -m benchmarks --case collective). It uses the checkout's extension.
$(PEERS_VENV)/.requirements: pyproject.toml requirements/peers.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_PY) -m pip install -q $(PIP)
	$(PEERS_PY) -m pip install -q --group build --group test -c requirements/dev.txt
	DS_BUILD_OPS=0 $(PEERS_PY) -m pip install -q --no-build-isolation --group peers -c requirements/peers.txt
	@echo "$(CURDIR)" > "$$($(PEERS_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchddp.pth"
	@touch $@

peers: build $(PEERS_VENV)/.requirements ## an environment with other packages to measure
	$(PEERS_PY) -c "import fairscale, deepspeed"

# All torchft tests, slow ones included, with torchft's release and its nightly. They use the checkout's extension.
$(FT_VENVS:%=%/.requirements): .venv-%/.requirements: pyproject.toml requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q $(PIP)
	.venv-$*/bin/python -m pip install -q --group build --group test -c requirements/dev.txt
	.venv-$*/bin/python -m pip install -q --group $* -c requirements/$*.txt
	@touch $@

FT_TESTS := tests/distributed/test_fault_tolerance.py tests/fault/test_torchft.py tests/unit/test_fault_tolerance.py
ft-test: build $(FT_VENVS:%=%/.requirements) ## tests with torchft's release and nightly
	for venv in $(FT_VENVS); do $$venv/bin/python -m pytest -q $(FT_TESTS) $(ARGS) || exit 1; done

# torchddp in frameworks that train with DDP, each in its own environment on top of .venv, whose packages it sees (above all torch)
# unless it has its own version of them. They use the checkout's extension.
CLIENTS ?= lightning accelerate composer engines trl ray spark
$(CLIENTS:%=.venv-%/.requirements): .venv-%/.requirements: pyproject.toml requirements/%.txt $(VENV)/.installed
	$(PYTHON) -m venv .venv-$*
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	.venv-$*/bin/python -m pip install -q $(PIP)
	.venv-$*/bin/python -m pip install -q --group $* -c requirements/$*.txt
	if grep -q '^$*-no-deps = ' pyproject.toml; then .venv-$*/bin/python -m pip install -q --no-deps --group $*-no-deps; fi
	@touch $@

test-clients: build $(CLIENTS:%=.venv-%/.requirements) ## trainers that use DDP: CLIENTS=lightning chooses one
	for client in $(CLIENTS); do .venv-$$client/bin/python -m pytest -q tests/clients/test_$$client*.py $(ARGS) || exit 1; done

conformance: build ## torch's own DDP tests (3 min)
	$(PY) scripts/check_conformance.py --jobs 3 $(ARGS)

# tests/gpu/run.sh without a GPU, in a copy of the checkout, with the Python and the torch of a machine that has one: build,
# imports, tests and benchmarks. Needs Python 3.12; an inactive pyenv version will do.
DRY_PYTHON ?= $(shell PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep -m 1 '^3\.12') \
  python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
DRY_VENV := .venv-dry

$(DRY_VENV)/.requirements: pyproject.toml requirements/dry.txt
	$(DRY_PYTHON) -m venv $(DRY_VENV)
	$(DRY_VENV)/bin/python -m pip install -q $(PIP)
	$(DRY_VENV)/bin/python -m pip install -q --group dry -c requirements/dry.txt
	@touch $@

dry-python:
	@echo $(DRY_PYTHON)

dry-run: ## the GPU tests' script, where there is no GPU (5 min)
dry-run: $(if $(DRY_PYTHON),$(DRY_VENV)/.requirements)
	$(if $(DRY_PYTHON),$(DRY_VENV)/bin/python scripts/gpu_dry_run.py $(ARGS),@echo "dry-run: skipped, Python 3.12 was not found")

# --- the CUDA variant: compiled, linked and imported; a GPU is not needed ----------------------------------------------

# The index has torch for one version of CUDA, $(TORCH_CUDA); torch's own index has it for others.
.PRECIOUS: .venv-cuda-%/.requirements
.venv-cuda-%/.requirements: pyproject.toml requirements/cuda.txt requirements/dev.txt
	$(PYTHON) -m venv .venv-cuda-$*
	.venv-cuda-$*/bin/python -m pip install -q $(PIP)
	$(if $(filter $(TORCH_CUDA),$*),,.venv-cuda-$*/bin/python -m pip install -q \
	  "$$(sed -n 's/^torch = \["\(.*\)"\]$$/\1/p' pyproject.toml)+cu$(subst .,,$*)" \
	  --extra-index-url https://download.pytorch.org/whl/cu$(subst .,,$*))
	.venv-cuda-$*/bin/python -m pip install -q --group cuda-tools --group test -c requirements/dev.txt
	$(if $(filter $(TORCH_CUDA),$*),.venv-cuda-$*/bin/python -m pip install -q --group cuda -c requirements/cuda.txt)
	@touch $@

cuda-build: $(CUDA_VENV)/.requirements ## the CUDA variant, without a GPU (4 min)
	@rm -rf $(CUDA_OUT)
	TORCHDDP_CUDA=1 $(CUDA_PY) setup.py -q build --build-lib $(CUDA_OUT)
	cd $(CUDA_OUT) && ../../$(CUDA_PY) -c \
	  "import torchddp, torchddp._C as c; print('imported', c.__file__, 'torchddp', torchddp.__version__)"
	$(CUDA_PY) -m scripts.check_symbols $(CUDA_OUT)/torchddp/_C*.so
	$(CUDA_PY) -m scripts.check_cuda_binary $(CUDA_OUT)/torchddp/_C*.so --build-dir build/cuda

# Tests CPU models with the CUDA build, in its own tree because the checkout holds the CPU build. The default tests cover code that
# the CUDA build compiles differently; others work too: make cuda-test CUDA_TESTS=tests/distributed.
CUDA_TESTS ?= tests/parity/test_training.py tests/distributed/test_transport.py tests/unit/test_build_check.py \
  tests/unit/test_nccl_setup.py
cuda-test: cuda-build ## CPU models with the CUDA variant (2 min more)
	cp -r tests examples benchmarks scripts pyproject.toml $(CUDA_OUT)
	cd $(CUDA_OUT) && ../../$(CUDA_PY) $(PYTEST) -p no:cacheprovider -m "not slow and not thorough" $(CUDA_TESTS) $(ARGS)

# --- wheels, in dist/: one for all of TORCHES, or with CUDA="12.8 13.0" one for each of these versions and .venv's torch -----

TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
# A torch that `make wheel-test` takes out of the wheel, to compile for it as a user would: make wheel-test UNCOVERED= skips that.
UNCOVERED ?= 2.12.1
# What `make wheel-test` installs, one after the other.
INSTALLED ?= 2.13.0 2.14.1
CUDA ?=

$(VENV)/.wheel-requirements: $(VENV)/.requirements requirements/wheel.txt
	$(PY) -m pip install -q --group wheel -c requirements/wheel.txt
	@touch $@

wheel: $(if $(CUDA),$(CUDA:%=wheel-%),wheel-all) ## one wheel for all TORCHES (15 min); CUDA="12.8 13.0": one for each, with its nvcc

# Also for CUDA, where there is an nvcc. Needs torch's wheels, not installed: 7 GB in build/torch.
wheel-all: setup $(VENV)/.wheel-requirements
	$(PY) -m scripts.join_wheels --torches $(TORCHES)

# /usr/local/cuda-VERSION, where it is there; otherwise the nvcc on the path.
wheel-%: .venv-cuda-%/.requirements $(VENV)/.wheel-requirements
	$(if $(wildcard /usr/local/cuda-$*/bin/nvcc),CUDACXX=/usr/local/cuda-$*/bin/nvcc) \
	  .venv-cuda-$*/bin/python -m scripts.build_wheel --tools-dir $(VENV)/bin

wheel-test: $(if $(CUDA),$(CUDA:%=wheel-test-%),wheel-test-all) ## train with the wheel in new environments, with several torches (10 min)

wheel-test-all: wheel-all
	$(PY) -m scripts.test_wheel \
	  dist/torchddp-$$(sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)-$$($(PY) -c 'from scripts.torch_wheels import PYTHON_TAG as t; print(t)')-*.whl \
	  --torches $(INSTALLED) $(if $(UNCOVERED),--uncovered $(UNCOVERED))

wheel-test-%: wheel-%
	$(PY) -m scripts.test_wheel dist/torchddp-*+cu$(subst .,,$*).torch*.whl --torch-of $(CURDIR)/.venv-cuda-$*/bin/python

# --- versions --------------------------------------------------------------------------------------------------------

lock: setup ## write requirements/*.txt anew: the newest versions that pyproject.toml allows (10 min)
	$(PY) -m scripts.lock $(ARGS)

clean: ## remove builds and caches, keep the environments
	rm -rf build dist *.egg-info torchddp/_C*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed
