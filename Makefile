# Everything runs in a virtual environment that the first target makes: `make demo`, `make test`.
# Where pip looks, and for which torch build, is pip's own configuration (PIP_EXTRA_INDEX_URL, pip.conf).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP  := $(VENV)/.installed
TORCH  := $(shell grep '^torch==' constraints.txt)

.PHONY: help install demo test test-native lint format format-check types check bench bench-search bench-step bench-wire bench-layouts bench-contest clean

help:
	@echo "make demo          train a small Llama on 1 and on 2 processes and compare (under 3 minutes)"
	@echo "make test          the whole test suite"
	@echo "make test-native   the tests of the native core, on a build with AddressSanitizer and UBSan (a minute or two)"
	@echo "make check         format-check, lint, types and test: what CI runs"
	@echo "make format        rewrite the sources in the project's format"
	@echo "make bench         planning time, bytes on the wire and step time, on this machine"
	@echo "make bench-layouts the optimum against the layouts that people write by hand"
	@echo "make bench-contest GRAPHS=DIR   the contest's strategy graphs in DIR (half an hour)"
	@echo "make clean         remove the virtual environment and what was built"

install: $(STAMP)

# torch first and alone: the largest download, and the rest then resolves against it.
$(STAMP): setup.cfg pyproject.toml constraints.txt $(wildcard setup.py csrc/*.?pp csrc/*/*.?pp)
	@echo "installing fxpar and what it needs into $(VENV) (once; torch is large)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt $(TORCH)
	$(PIP) install --quiet --constraint constraints.txt --editable ".[zoo,test,dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/fxpar demo

test: $(STAMP)
	$(BIN)/python -m pytest

# Its own folder: the installed extension stays as it is. Python itself leaks on purpose.
SANITIZED := build/sanitized
NATIVE_TESTS := $(addprefix tests/unit/test_,native.py engine.py strategy_graph.py folding.py)
test-native: $(STAMP)
	FXPAR_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 \
	$(BIN)/python .ci/sanitized.py $(SANITIZED) -p no:cacheprovider $(NATIVE_TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: format-check lint types test

bench: bench-search bench-step bench-wire

bench-search bench-wire: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$(BENCH_$@).py

BENCH_bench-search := search_time
BENCH_bench-wire   := wire_bytes

bench-step: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.step_time

bench-layouts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.against_layouts

GRAPHS ?= ../shared/data/iopddl
bench-contest: $(STAMP)
	$(BIN)/python benchmarks/contest.py $(GRAPHS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f fxpar/_native*.so
