# Every target works on a fresh clone: the first one that needs the environment creates it.
#
# What may be set on the command line or in the environment:
#   PYTHON=/path/to/python    the interpreter that makes the environment (3.11 or newer)
#   TORCH_VERSION=2.13.0      the torch to install
#   TORCH=2.15.0              the torch that `make test-torch` tests, in an environment of its own
#   TORCH_INDEX_URL=...       a package index for torch alone, such as PyTorch's CPU wheel index
#   EXTRAS=zoo,docs,dev       the extras to install; `bench` adds the peers to compare with
#   CONSTRAINTS=              install the newest packages, not the versions in constraints.txt
#   WORKERS=3                 test processes: two leave a fifth of two processors idle
#   ISA=avx2                  test as on a CPU with no more: portable, avx2, avx_vnni, avx512, avx512_vnni
#   EXAMPLES=300              examples that `make fuzz` draws for each property
#   ONLY=tests/property/...   the files that `make fuzz` draws for; all of them by default
#   NETWORKS=20000            how many `make fuzz-networks` draws, and SEED=1, its first seed
#   BASE=HEAD                 the revision that `make replay` compares with

VENV          := .venv
TORCH_VERSION ?= 2.13.0
EXTRAS        ?= zoo,docs,dev
CONSTRAINTS   ?= constraints.txt
WORKERS       ?= 3
ISA           ?=
EXAMPLES      ?= 300
ONLY          ?=
NETWORKS      ?= 20000
SEED          ?= 1
BASE          ?= HEAD
TORCH         ?=

BIN   := $(VENV)/bin
# One stamp per combination, so that asking for another torch or more extras installs it.
comma := ,
STAMP := $(VENV)/.installed-torch-$(TORCH_VERSION)-$(subst $(comma),-,$(EXTRAS))

# What the caller's shell points Python to must not stand in for what is in the environment.
unexport PYTHONPATH PYTHONHOME
# Bytecode is kept: the tests start many processes, each of which would compile every module.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast kernels test-torch wheel check format bench bench-kernels bench-page asan fuzz fuzz-networks replay docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create the environment in .venv (the other targets do it when they need to)

$(STAMP): pyproject.toml benchmarks/pyproject.toml $(CONSTRAINTS) tools/find-python
	@if [ ! -x $(BIN)/pip ]; then \
	  python=$$(sh tools/find-python $(PYTHON)) || exit 1; \
	  echo "creating $(VENV) with $$python"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "torch==$(TORCH_VERSION)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[$(EXTRAS)]" --editable ./benchmarks \
	  "torch==$(TORCH_VERSION)"
	@rm -f $(VENV)/.installed-torch-* && touch $@

demo: $(STAMP) ## quantize and compile a real sentence encoder, and say what came of it
	$(BIN)/qfuse demo

# One OpenMP thread each: test processes with a full team each fight over the cores. Each gets a
# part of the tests that are next to each other, and so use the same models and modules.
PYTEST := OMP_NUM_THREADS=1 QFUSE_TEST_ISA=$(ISA) $(BIN)/python -m pytest -n $(WORKERS) \
  --dist worksteal

# Built ahead, for every instruction set: a test has a time limit. Without a compiler the tests use
# the kernels of torch.
kernels: $(STAMP) ## compile the kernels for every instruction set
	$(BIN)/python -c "from qfuse import kernels; \
	  kernels.load().available and kernels.build_every_path()"

test: kernels ## run the tests: the same draw for everybody (ISA=avx2: as on a lesser CPU)
	$(PYTEST) -m "not (slow_bench or thorough)"

test-all: kernels ## run these, and whole models and processes that take minutes more
	$(PYTEST) -m "not slow_bench"

test-fast: $(STAMP) ## run the tests of single rules and ops: no models, no compiler, no drawing
	$(PYTEST) -m "not (slow or slow_bench or thorough or zoo or export or own_kernels or compiler or property)"

test-torch: ## run the tests with another torch (TORCH=2.15.0), in .venv-torch-2.15.0
	@test -n "$(TORCH)" || { echo "say which torch: make test-torch TORCH=2.15.0"; exit 2; }
	$(MAKE) test VENV=.venv-torch-$(TORCH) TORCH_VERSION=$(TORCH)

wheel: $(STAMP) ## build a wheel with the kernels for every instruction set inside, in dist
	rm -rf build/kernels
	$(BIN)/qfuse build-kernels --into build/kernels
	QFUSE_WHEEL_KERNELS=build/kernels $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation \
	  --wheel-dir dist .

check: $(STAMP) ## lint, format check, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure against the peers that are installed (ARGS="--page docs/benchmarks.md")
	$(BIN)/python -m qfuse_bench.experiments.ablation $(ARGS)
	$(BIN)/python -m qfuse_bench.experiments.inductor_merge $(ARGS)
	$(BIN)/qfuse bench --goals $(ARGS)
	classes=$$($(BIN)/python -m qfuse_bench.harness.machine_class) || exit 1; for isa in $$classes; do \
	  $(BIN)/qfuse bench --goals --isa $$isa $(ARGS) || exit 1; \
	done
	$(BIN)/qfuse bench $(ARGS)

bench-kernels: $(STAMP) ## measure the kernels against torch's (ARGS=--quick for a part)
	$(BIN)/python -m qfuse_bench.kernels.run $(ARGS)

bench-page: $(STAMP) ## measure how fast the page of a report opens in headless Chromium
	$(BIN)/python -m qfuse_bench.experiments.page_time

# Built ahead: a test has a time limit. Capturing by pytest's own means lets the report through.
asan: $(STAMP) ## run the kernels' tests under AddressSanitizer and UBSan
	sh tools/with-asan $(BIN)/qfuse build-kernels --all
	OMP_NUM_THREADS=2 sh tools/with-asan $(BIN)/python -m pytest --capture=sys tests/kernels

fuzz: $(STAMP) ## draw anew for the property tests (EXAMPLES=300 each: at most 10 minutes on 2 cores)
	HYPOTHESIS_PROFILE=fuzz QFUSE_FUZZ_EXAMPLES=$(EXAMPLES) $(PYTEST) $(ONLY) -m property --timeout 0

# Interrupted, it goes on where it was; what it drew is in build/fuzz.
fuzz-networks: $(STAMP) ## draw random networks through the lowering (NETWORKS=20000 SEED=1: an hour of CPU time)
	$(BIN)/python tools/fuzz_networks.py --networks $(NETWORKS) --seed $(SEED)

replay: $(STAMP) ## compare what becomes of the zoo with another revision (BASE=HEAD)
	OMP_NUM_THREADS=1 $(BIN)/python tools/replay.py $(BASE) $(ARGS)

docs: $(STAMP) ## run the code in the documentation, write what it prints, and build the site
	QFUSE_WRITE_DOCS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d build/doctrees . build/site
	@echo "see build/site/index.html"

clean: ## remove the environment, caches and build outputs
	rm -rf $(VENV) .venv-torch-* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
