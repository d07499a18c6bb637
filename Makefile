# What each target does: `make help`. Everything is installed into .venv by the first target that needs it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BENCH   = PYTHONPATH=.:tests:tests/trainers $(BIN)/python -m benches.

# tritonserver's Python backend is linked to the interpreter's shared library, which Debian packages on its own.
# Installed where we may; elsewhere `python -m server` says what is missing.
HAS_LIBPYTHON := from server.installation import find_installation; find_installation()
VERSION := import sys; print("%d.%d" % sys.version_info[:2])

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-containers architectures lint bench bench-consolidate targets fuzz kills soak \
	clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 27

setup: $(VENV)/installed ## Install everything into .venv

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 12) or sys.exit("error: this Python cannot run modelyard: expected 3.10, 3.11 or 3.12, got %d.%d; pass another, as in make PYTHON=python3.12." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "error: $(PYTHON) has no venv: expected the standard module, got none; install it (Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "installing into $(VENV) (torch, transformers, tritonserver, ...)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@# Beside the environment, not in it: a package of stubs alone would pass for an installed TensorRT, and pip would
	@# want TensorRT itself with it.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(VENV)/stubs tensorrt-stubs==10.13.0.35.1
	@$(BIN)/python -c '$(HAS_LIBPYTHON)' || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
		apt-get install -y -qq "libpython$$($(BIN)/python -c '$(VERSION)')"; } >&2 || true
	@# As an installed package would be: an environment that writes no bytecode would parse every module at every start.
	@$(BIN)/python -m compileall -q export server client demo || true
	@touch $@

# Only the tests train; its build imports torch, so it comes after everything else.
$(VENV)/trainers: $(VENV)/installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
	@touch $@

demo: setup ## Fetch a real checkpoint, export, verify, publish, serve, ask, stop
	@$(BIN)/python -m demo

serve: setup ## Serve model_repository until Ctrl-C
	@exec $(BIN)/python -m server

test: setup lint $(VENV)/trainers ## Run the whole test suite
	@$(BIN)/python -m pytest

test-containers: setup ## Build the image, bring compose.yaml up with podman, break it, stop it
	@docker/podman/prepare.sh
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,containers]'
	@$(BIN)/python -m pytest -m containers tests/project/test_containers.py
	@$(BIN)/python -m pytest tests/project/test_compose.py

architectures: setup ## Export and prove all 63 architectures and tasks, and write docs/architectures.md
	@MODELYARD_WRITE_TABLE=1 $(BIN)/python -m pytest -m 'architectures or not architectures' tests/export/test_architectures.py

lint: setup ## Check format, style and types
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy --no-error-summary

bench: setup ## Measure the demo model with perf_analyzer on real text
	@$(BIN)/python -m demo.bench

bench-consolidate: setup $(VENV)/trainers ## Measure consolidate beside DeepSpeed's script and cp
	@$(BENCH)bench_consolidate $(BENCH_OPTIONS)

targets: setup ## Measure again what each target's ONNX Runtime loads
	@$(BENCH)bench_targets

fuzz: setup ## Feed the checkpoint readers 40,000 hostile files, and every HTTP operation 2,000 requests
	@$(BENCH)fuzz_torch_zip --inputs 40000
	@MODELYARD_FUZZ=2000 $(BIN)/python -m pytest tests/server/test_fuzz_http.py

kills: setup ## Kill every kind of process 20 times under load, and see it come back
	@MODELYARD_KILLS=20 $(BIN)/python -m pytest tests/server/test_healing.py -s

SOAK_MINUTES ?= 20

soak: setup ## Overload the demo's server for SOAK_MINUTES (20), then rest it: errors, latency, memory
	@$(BENCH)soak --minutes $(SOAK_MINUTES)

clean: ## Remove the environment and the caches; published models stay
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache
