# headrace from a fresh clone: `make demo` and `make test`. `make help` lists the rest.
#
# Everything is installed into .venv, once; edits to native sources or pyproject.toml rebuild what
# they touch, edits to Python need nothing. Needs Python 3.11 or newer, a C++20 compiler and cmake;
# as root on Debian, make installs what is missing (debian-packages.txt).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= $(shell nproc)
# Processes that share the Python tests out, a module each: many tests wait for clusters and guests.
TEST_JOBS ?= 3
SHARED_OUT = --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder
# Extra arguments: make test PYTEST="-k order", make demo DATA=folder DEMO="--epochs 2"
PYTEST ?=
DATA ?=
DEMO ?=
BENCH ?=
QUICK ?=
PAPER ?=
MUTANTS ?= store order plane control io node
MUTANT ?=
FUZZ_SECONDS ?= 600
SOAK_KILLS ?= 300
SOAK ?=

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/done
# TensorFlow and JAX: gigabytes of their own, on top of what $(VENV) has.
FRAMEWORKS := .venv-frameworks
# Ray, transformers, Jupyter, DeepSpeed: launchers that only the slow tests start.
LAUNCHERS := .venv-launchers
BUILD := build/dev
NATIVE := $(shell find native -name '*.cc' -o -name '*.h')
# The venv's pip in one place. Packages are byte-compiled when they are first imported: most of torch
# never is, and compiling all of it costs more than installing it.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALL := $(PIP) install --no-compile

# Where it is set, each process that imports torch or TensorFlow compiles it again: 10 s a time.
unexport PYTHONDONTWRITEBYTECODE
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export PIP_ROOT_USER_ACTION := ignore

.DELETE_ON_ERROR:
.PHONY: help demo build test test-slow check format bench asan tsan fuzz docs wheel stub clean

help:
	@echo 'make demo        pack real images, train on them, interrupt, resume, compare (DATA=folder)'
	@echo 'make test        build; check; native tests; Python tests (PYTEST="-k name")'
	@echo 'make test-frameworks  the tests of TensorFlow and JAX, in .venv-frameworks; part of make test'
	@echo 'make test-peers  NVMe/TCP against the Linux kernel in QEMU guests, and tshark; part of make test'
	@echo 'make test-slow   the tests that take minutes'
	@echo 'make test-ray    a real Ray cluster, in .venv-launchers; part of make test-slow'
	@echo 'make launchers   the launchers that people use, and how many samples each delivers: a table'
	@echo 'make soak        SOAK_KILLS=$(SOAK_KILLS) kills of node daemon and clients; SOAK="--seed 1"'
	@echo 'make check       ruff, mypy --strict, import layers, clang-format, stub freshness'
	@echo 'make format      let ruff and clang-format rewrite what they can'
	@echo 'make bench       benchmarks/loader.py and plane.py: headrace beside other loaders, and the limits'
	@echo 'make paper       the claims of the papers, measured: docs/papers.md, in an hour; QUICK=1: ten minutes'
	@echo 'make asan, tsan  the native tests under AddressSanitizer + UBSan, ThreadSanitizer'
	@echo 'make fuzz        each fuzz target, native and Python, for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make coverage    which lines of src the fast tests run, a line for each file'
	@echo 'make mutants     small changes in $(MUTANTS): does a test notice? MUTANT="--count 100"'
	@echo 'make docs        the documentation, into docs/_build/html; make test builds and checks it, too'
	@echo 'make pictures    docs/images: pages in Chromium, commands in a terminal, drawings'
	@echo 'make wheel       dist/: a source archive, and the wheel that is built from it, its libraries inside'
	@echo 'make stub        write src/headrace/_native.pyi anew'
	@echo 'make clean       remove all that make made'

# -- what is installed, a stamp for each purpose ---------------------------------------------------

$(DONE)/venv:
	@test -n "$(PYTHON)" || { echo 'no python3 found: headrace needs Python 3.11 or newer' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is Python {sys.version.split()[0]}, expected 3.11 or newer. Name one: make PYTHON=/path/to/python3.11")'
	@case "$$($(PYTHON) -c 'import sys; print(sys.base_prefix)')" in \
	  /usr) tools/debian-packages build python ;; *) tools/debian-packages build ;; esac
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) 'pip>=26,<27'
	@mkdir -p $(DONE) && touch $@

# torch goes first, alone and named exactly: any other spelling, or a package that depends on it, may
# bring the CUDA build and its gigabytes.
$(DONE)/torch: $(DONE)/venv
	$(INSTALL) torch==2.13.0
	@touch $@

$(DONE)/build-tools: $(DONE)/venv pyproject.toml
	$(INSTALL) --group build
	@touch $@

# Editable: Python from src/, the extension from $(BUILD), which ninja brings up to date.
$(DONE)/build: $(DONE)/build-tools pyproject.toml CMakeLists.txt $(NATIVE)
	$(INSTALL) --no-build-isolation -C build-dir=$(BUILD) --editable .
	@touch $@

$(DONE)/demo: pyproject.toml $(DONE)/torch
	$(INSTALL) --group demo
	@touch $@

$(DONE)/test: pyproject.toml $(DONE)/torch
	$(INSTALL) --group test --group check
	@touch $@

$(DONE)/check: pyproject.toml $(DONE)/venv
	$(INSTALL) --group check
	@touch $@

$(DONE)/wheel: pyproject.toml $(DONE)/build-tools
	$(INSTALL) --group wheel
	@touch $@

$(DONE)/docs: pyproject.toml $(DONE)/venv
	$(INSTALL) --group docs
	@touch $@

$(DONE)/bench: benchmarks/requirements.txt $(DONE)/torch
	$(INSTALL) --requirement benchmarks/requirements.txt
	@touch $@

# A layer over $(VENV): its own packages come first, headrace and pytest are found below. The layer is
# laid last, so that pip neither counts nor touches what is below.
$(DONE)/frameworks: pyproject.toml $(DONE)/venv
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip -qq --disable-pip-version-check install 'pip>=26,<27'
	$(FRAMEWORKS)/bin/python -m pip -qq --disable-pip-version-check install --no-compile --group frameworks
	@below=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  here=$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$below')" >"$$here/below.pth"
	@touch $@

# The same, but what is below counts: these packages need torch, and must take the one that is there. The
# versions below are constraints, so that the layer brings no other version of anything. DeepSpeed is built
# from source, which may fail: its launcher is then skipped.
$(DONE)/launchers: pyproject.toml $(DONE)/test
	$(PYTHON) -m venv --clear $(LAUNCHERS)
	$(LAUNCHERS)/bin/python -m pip -qq --disable-pip-version-check install 'pip>=26,<27'
	@below=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  here=$$($(LAUNCHERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$below')" >"$$here/below.pth"
	@$(BIN)/python -m pip --disable-pip-version-check list --format=freeze --exclude-editable | grep -v '^pip==' >$(LAUNCHERS)/below.txt
	$(LAUNCHERS)/bin/python -m pip -qq --disable-pip-version-check install --no-compile --constraint $(LAUNCHERS)/below.txt --group launchers
	$(LAUNCHERS)/bin/python -m pip -qq --disable-pip-version-check install --no-compile --constraint $(LAUNCHERS)/below.txt --group deepspeed || \
	  echo 'deepspeed cannot be installed: its launcher is not tested' >&2
	@touch $@

$(DONE)/debian-%: debian-packages.txt tools/debian-packages $(DONE)/venv
	@tools/debian-packages $*
	@touch $@

build: $(DONE)/build

# -- the demo --------------------------------------------------------------------------------------

demo: $(if $(DATA),,$(DONE)/debian-demo) $(DONE)/demo $(DONE)/build
	$(BIN)/headrace demo $(if $(DATA),--data "$(DATA)") $(DEMO)

# -- tests -----------------------------------------------------------------------------------------

# The images of the demo are those of the examples' tests too. What keeps processors busy comes first; then the Python
# tests, many of which wait, beside the frameworks' and the guests'. The output of each comes in one piece, but for the
# Python tests', which is printed as it comes. Packages are installed before: two installations at once would wait for
# each other, or fail.
BESIDE := $(MAKE) --no-print-directory --jobs=2 --output-sync=target
test: $(addprefix $(DONE)/debian-,test demo cluster browser check peers) $(DONE)/test $(DONE)/docs $(DONE)/frameworks $(DONE)/build
	@$(BESIDE) check native-test
	@$(BESIDE) shared-as-it-comes test-frameworks test-peers
	@$(MAKE) --no-print-directory test-alone

.PHONY: test-python test-shared test-alone shared-as-it-comes
test-python: $(DONE)/build
	@$(MAKE) --no-print-directory test-shared
	@$(MAKE) --no-print-directory test-alone

test-shared: $(DONE)/build
	$(BIN)/python -m pytest -m 'not slow and not alone' $(if $(filter-out 1,$(TEST_JOBS)),$(SHARED_OUT)) $(PYTEST)

shared-as-it-comes:
	@$(MAKE) --no-print-directory --output-sync=none test-shared

# What is judged by a clock runs by itself, at the end; 5 says that PYTEST selects none of it. Only modules with such
# tests are collected, unless PYTEST names others.
ALONE = $(if $(findstring tests/,$(PYTEST)),,$(shell grep -rl --include='*.py' 'mark\.alone' tests))
test-alone: $(DONE)/build
	$(BIN)/python -m pytest -q -m 'alone and not slow' $(ALONE) $(PYTEST) || test $$? = 5

# The frameworks' layer for the real DLIO's TensorFlow, the launchers' for their matrix.
test-slow: $(DONE)/debian-cluster $(DONE)/debian-peers $(DONE)/test $(DONE)/frameworks $(DONE)/launchers $(DONE)/wheel $(DONE)/build
	$(BIN)/python -m pytest -m slow $(PYTEST)
	$(BIN)/python -m pytest -q -m slow tests/peers
	@$(MAKE) --no-print-directory test-ray

# A head and three nodes of Ray's, all of them processes of this machine.
.PHONY: test-ray
test-ray: $(DONE)/test $(DONE)/launchers $(DONE)/build
	$(LAUNCHERS)/bin/python -m pytest -q tests/on_ray

# Every launcher with every loader, as a table: samples delivered, unique, duplicates, exit.
.PHONY: launchers
launchers: $(DONE)/debian-cluster $(DONE)/test $(DONE)/launchers $(DONE)/build
	PYTHONPATH=tests $(BIN)/python -m launchers

# Counts go to build/soak.json too.
.PHONY: soak
soak: $(DONE)/test $(DONE)/build
	PYTHONPATH=tests $(BIN)/python -m soak --kills $(SOAK_KILLS) --json build/soak.json $(SOAK)

# A process each: TensorFlow and JAX bring their own runtimes and threads.
.PHONY: test-frameworks
test-frameworks: $(DONE)/debian-demo $(DONE)/test $(DONE)/frameworks $(DONE)/build
	$(FRAMEWORKS)/bin/python -m pytest -q tests/frameworks/tensorflow
	$(FRAMEWORKS)/bin/python -m pytest -q tests/frameworks/grain tests/store/test_array_record.py

# Kernels and the guests' disk are made once, in build/peers. Each check is printed as it passes.
.PHONY: test-peers
test-peers: $(DONE)/debian-peers $(DONE)/test $(DONE)/build
	$(BIN)/python -m pytest -q -m 'not slow' tests/peers

# The same build folder as the extension's, so that each native source is compiled once.
.PHONY: native-test
native-test: $(DONE)/debian-test $(DONE)/build
	@cmake -S . -B $(BUILD) -DHEADRACE_TESTS=ON >build/configure.log || { cat build/configure.log; exit 1; }
	cmake --build $(BUILD)
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS)

# -- checks: each must be able to fail -------------------------------------------------------------

# Types are checked against the libraries themselves: those that the tests need.
check: $(DONE)/debian-check $(DONE)/test $(DONE)/build
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@if command -v clang-format >/dev/null; then set -x; clang-format --dry-run -Werror $(NATIVE); \
	  else echo 'clang-format is missing (Debian: clang-format): native sources are not checked' >&2; \
	  test -z "$(CI)"; fi
	@$(BIN)/python -m nanobind.stubgen -q -p native/bindings/stub.pat -m headrace._native -o build/_native.pyi
	diff -u src/headrace/_native.pyi build/_native.pyi

stub: $(DONE)/build
	$(BIN)/python -m nanobind.stubgen -q -p native/bindings/stub.pat -m headrace._native -o src/headrace/_native.pyi

format: $(DONE)/debian-check $(DONE)/check
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	clang-format -i $(NATIVE)

# -- native variants -------------------------------------------------------------------------------

asan: SANITIZE := address,undefined
tsan: SANITIZE := thread
asan tsan: $(DONE)/debian-build $(DONE)/debian-test
	cmake -S . -B build/$@ -G Ninja -DHEADRACE_PYTHON=OFF -DHEADRACE_TESTS=ON -DHEADRACE_SANITIZE=$(SANITIZE)
	cmake --build build/$@
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	  ctest --test-dir build/$@ --output-on-failure --no-tests=error -j $(JOBS)

# -- tests that would notice -----------------------------------------------------------------------

$(DONE)/mutants: pyproject.toml $(DONE)/test
	$(INSTALL) --group mutants
	@touch $@

.PHONY: coverage mutants
coverage: $(DONE)/mutants $(DONE)/build
	$(BIN)/python -m pytest -q -m 'not slow and not alone' --cov=src/headrace --cov-report=term:skip-covered $(PYTEST)

mutants: $(DONE)/mutants $(DONE)/build
	$(BIN)/python tools/mutants $(MUTANTS) --json build/mutants.json $(MUTANT)

# Guides the Python targets by coverage; without it they change inputs at random.
$(DONE)/fuzz: pyproject.toml $(DONE)/venv
	$(INSTALL) --group fuzz || echo 'atheris cannot be installed: Python is fuzzed without it' >&2
	@touch $@

# Each target keeps its corpus in build/fuzz/corpus/NAME and goes on from there.
PYTHON_FUZZ := wire frames session mapped control policy chap target
.PHONY: fuzz-python
fuzz: fuzz-python
fuzz-python: $(DONE)/test $(DONE)/fuzz $(DONE)/build
	@set -e; for target in $(PYTHON_FUZZ); do \
	  echo "python $$target: $(FUZZ_SECONDS) s"; \
	  PYTHONPATH=tests $(BIN)/python -m fuzz $$target --seconds $(FUZZ_SECONDS); \
	done

fuzz: $(DONE)/debian-build $(DONE)/debian-fuzz
	cmake -S . -B build/fuzz -G Ninja -DHEADRACE_PYTHON=OFF -DHEADRACE_FUZZ=ON \
	  -DHEADRACE_SANITIZE=address,undefined -DCMAKE_CXX_COMPILER=clang++
	cmake --build build/fuzz
	@set -e; for target in build/fuzz/*_fuzz; do \
	  name=$$(basename $$target); corpus=build/fuzz/corpus/$$name; mkdir -p $$corpus; \
	  echo "$$name: $(FUZZ_SECONDS) s"; \
	  $$target -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -verbosity=0 \
	    -artifact_prefix=build/fuzz/$$name- $$corpus; \
	done

# -- the rest --------------------------------------------------------------------------------------

# All take the same options: make bench BENCH=--quick.
bench: $(DONE)/debian-bench $(DONE)/bench $(DONE)/frameworks $(DONE)/build
	$(BIN)/python benchmarks/loader.py $(BENCH)
	$(BIN)/python benchmarks/plane.py $(BENCH)
	$(BIN)/python -m benchmarks.pixels $(if $(BENCH),--rounds 1 --pictures 200)
	$(BIN)/python -m benchmarks.tokens $(if $(BENCH),--rounds 1 --tokens 20e6)
	$(BIN)/python benchmarks/node.py $(BENCH)
	$(BIN)/python benchmarks/unmodified.py $(BENCH)
	$(BIN)/python benchmarks/mount.py $(BENCH)
	$(BIN)/python benchmarks/policy.py $(BENCH)
	$(BIN)/python benchmarks/fabric.py $(BENCH)
	$(BIN)/python -m benchmarks.bench $(BENCH)

# A run that was ended goes on where it was. docs/papers.md, its pictures, benchmarks/results/paper-DATE.json.
.PHONY: paper
paper: $(DONE)/debian-bench $(DONE)/test $(DONE)/frameworks $(DONE)/build
	$(BIN)/python -m benchmarks.paper $(if $(filter-out 0,$(QUICK)),--quick) $(PAPER)

# The archive first, and the wheel from what is in it; auditwheel puts the codecs inside and says how old a
# glibc may be.
# What the documentation shows, made anew: docs/images.
.PHONY: pictures
pictures: $(addprefix $(DONE)/debian-,browser demo) $(DONE)/test $(DONE)/build
	$(BIN)/python tools/pictures

wheel: $(DONE)/wheel
	rm -rf build/wheel dist
	$(BIN)/python -m build --no-isolation --outdir build/wheel .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
	@ls dist

docs: $(DONE)/docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(LAUNCHERS) build dist docs/_build demo-out .mypy_cache .ruff_cache .pytest_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
