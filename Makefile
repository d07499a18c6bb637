# What each target does: `make help`. Everything is installed into .venv by the first target that needs it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BENCH   = PYTHONPATH=.:tests:tests/trainers $(BIN)/python -m benches.

# tritonserver's Python backend is linked to the interpreter's shared library, which Debian packages on its own.
# Installed where we may; elsewhere `python -m server` says what is missing.
HAS_LIBPYTHON := from server.tritonserver.installation import find_installation; find_installation()
VERSION := import sys; print("%d.%d" % sys.version_info[:2])

.DEFAULT_GOAL := help
# All that `help` lists; what makes a file is not listed.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(MAKEFILE_LIST))

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 27

setup: $(VENV)/installed ## Install everything into .venv

# Everything by its hash, but torch: which build of it, with CUDA's libraries or without, is the reader's choice.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --no-deps --requirement

INSTALLED_FROM := pyproject.toml setup.py $(addprefix requirements/,dev.txt torch.txt stubs.txt)

$(VENV)/installed: $(INSTALLED_FROM)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 12) or sys.exit("error: this Python cannot run modelyard: expected 3.10, 3.11 or 3.12, got %d.%d; pass another, as in make PYTHON=python3.12." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "error: $(PYTHON) has no venv: expected the standard module, got none; install it (Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "installing into $(VENV) (torch, transformers, tritonserver, ...)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(LOCKED) requirements/dev.txt --no-compile
	@$(PIP) --requirement requirements/torch.txt --no-compile
	@$(PIP) --no-build-isolation --no-deps --editable .
	@# Beside the environment, not in it: a package of stubs alone would pass for an installed TensorRT, and pip would
	@# want TensorRT itself with it.
	@$(LOCKED) requirements/stubs.txt --upgrade --target $(VENV)/stubs
	@$(BIN)/python -c '$(HAS_LIBPYTHON)' || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
		apt-get install -y -qq "libpython$$($(BIN)/python -c '$(VERSION)')"; } >&2 || true
	@# An environment that writes no bytecode would parse every module at every start. pip would use one core for it.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib modelyard export server client gateway demo || true
	@touch $@

# Only the tests train; its build imports torch, so it comes after everything else.
$(VENV)/trainers: $(VENV)/installed requirements/trainers.txt
	@$(LOCKED) requirements/trainers.txt --no-build-isolation
	@touch $@

# Schemas, which the tests of docker/kubernetes read: beside the environment, for what they depend on is not there.
$(VENV)/kubernetes/installed: $(VENV)/installed requirements/kubernetes.txt
	@rm -rf $(@D)
	@$(LOCKED) requirements/kubernetes.txt --no-compile --target $(@D)
	@touch $@

demo: setup ## Fetch a real checkpoint, export, verify, publish, serve, ask, stop
	@$(BIN)/python -m demo

serve: setup ## Serve model_repository until Ctrl-C
	@exec $(BIN)/python -m server

# Much of a test is waiting for a server to start or a trainer to end, so two cores keep three processes at work. Each
# starts servers of its own.
TEST_PROCESSES ?= 3

# What failed is run once more, alone, and its second result counts: of 1,800 tests that start servers and kill them, one
# may meet a machine that has no core for it. What fails twice is told as failed, and what passes then was named before.
# Only where all were run (exit code 1) is that enough. With files kept together xdist 3.8 waits without end once it has
# started a process in the place of one that crashed, so it starts none.
test: setup ## Run the whole test suite
	@# At once: what checks the types keeps one core busy, and what is fetched hardly any.
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint $(VENV)/trainers $(VENV)/kubernetes/installed
	@$(BIN)/python -m pytest --cache-clear --numprocesses $(TEST_PROCESSES) --dist loadfile --max-worker-restart 0 || \
		{ [ $$? = 1 ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }

UV := .cache/uv/bin/uv

$(UV):
	@$(PYTHON) -m venv .cache/uv
	@.cache/uv/bin/python -m pip install -qq --disable-pip-version-check uv==0.13.9

# What meets the interpreter itself: pickles and archives, a server that embeds it and looks into its stack, the demo.
PYTHON_TESTS := $(addprefix tests/checkpoints/test_,fsdp.py huggingface.py torch_file.py torch_zip.py zip_archive.py) \
	tests/server/healing/test_sampling.py tests/server/test_server.py tests/server/healing/test_healing.py tests/project/test_demo.py
OTHER = .cache/python-$(shell $(PYTHON) -c '$(VERSION)')

# Installed by uv, which keeps what it fetched: PyPI's torch brings 3 GB of CUDA's libraries, the same for every Python.
$(OTHER)/installed: $(INSTALLED_FROM) | $(UV)
	@echo "installing into $(OTHER)" >&2
	@$(PYTHON) -m venv $(OTHER)
	@$(UV) pip install --no-config --quiet --python $(OTHER)/bin/python --require-hashes --no-deps --requirement requirements/dev.txt
	@$(UV) pip install --no-config --quiet --python $(OTHER)/bin/python --requirement requirements/torch.txt
	@$(UV) pip install --no-config --quiet --python $(OTHER)/bin/python --no-build-isolation --no-deps --editable .
	@touch $@

test-python: $(OTHER)/installed ## Run what depends on the Python with another: make test-python PYTHON=python3.12
	@$(OTHER)/bin/python -m pytest $(PYTHON_TESTS)

LOWEST = .cache/lowest

# The lowest release of each library that pyproject.toml allows; the newest are in the locks. What trains the checkpoints
# of tests is that of the locks.
$(LOWEST)/installed: pyproject.toml | $(UV)
	@echo "installing into $(LOWEST)" >&2
	@$(UV) venv --no-config --quiet --allow-existing --python $(PYTHON) $(LOWEST)
	@$(UV) pip install --no-config --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		"numpy<2" pytest==9.2.0 "setuptools>=77" "wheel>=0.45" accelerate==1.15.0 peft==0.21.2 ".[all]"
	@touch $@

test-lowest: $(LOWEST)/installed ## Export, prove and read with the lowest release of each library that is allowed
	@$(LOWEST)/bin/python -m pytest -W default tests/export/graph/test_architectures.py tests/export/graph/test_precision.py \
		tests/backends tests/checkpoints/test_huggingface.py tests/checkpoints/test_torch_file.py

test-containers: setup ## Build the image, bring compose.yaml up with podman, break it, stop it
	@docker/podman/prepare.sh
	@$(LOCKED) requirements/containers.txt
	@$(BIN)/python -m pytest -m containers tests/project/test_containers.py
	@$(BIN)/python -m pytest tests/project/test_compose.py

# In an environment of their own: they bring a hundred packages that nothing else here needs.
.cache/doors/installed: requirements/doors.txt
	@echo "installing into .cache/doors" >&2
	@$(PYTHON) -m venv .cache/doors
	@.cache/doors/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --requirement $<
	@touch $@

test-doors: setup .cache/doors/installed ## Ask the gateway with LangChain's and LlamaIndex's classes, and the server with KServe's
	@MODELYARD_DOORS=.cache/doors/bin/python $(BIN)/python -m pytest tests/gateway/test_gateway.py tests/client/test_others.py \
		-k 'other_clients or kserve'

.cache/stores/installed: requirements/stores.txt
	@echo "installing into .cache/stores" >&2
	@$(PYTHON) -m venv .cache/stores
	@.cache/stores/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --requirement $<
	@touch $@

test-stores: setup .cache/stores/installed ## Read a checkpoint from s3:// and gs://, from servers that speak their protocols
	@MODELYARD_STORES=.cache/stores/bin/python $(BIN)/python -m pytest tests/export/test_fetching.py

.cache/batch/installed: requirements/batch.txt
	@echo "installing into .cache/batch" >&2
	@$(PYTHON) -m venv .cache/batch
	@.cache/batch/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --requirement $<
	@touch $@

test-batch: setup .cache/batch/installed ## Embed 40,000 rows with Ray Data and Spark while tritonserver is killed; needs Java 17
	@.cache/batch/bin/python -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall .
	@MODELYARD_BATCH=$(CURDIR)/.cache/batch/bin/python $(BIN)/python -m pytest tests/client/test_batch.py

architectures: setup ## Export and prove all 67 architectures and tasks, and write docs/architectures.md
	@MODELYARD_WRITE_TABLE=1 $(BIN)/python -m pytest -m 'architectures or not architectures' tests/export/graph/test_architectures.py

checkpoints: setup $(VENV)/trainers ## Train the rarer variants of ZeRO checkpoints too, and read them bit for bit
	@$(BIN)/python -m pytest -m 'matrix or not matrix' tests/checkpoints

rarer: setup $(VENV)/trainers ## Try the rarer faults and exports too, which the suite leaves out for their time
	@$(BIN)/python -m pytest -m rarer

failing-disk: setup ## Fail every single write, rename and sync of a publication, not a sample of them
	@MODELYARD_DISK_EVERY=1 $(BIN)/python -m pytest tests/export/repository/test_failing_disk.py

pictures: setup ## Serve a trained MobileNetV2 and every kind of detector, and compare what they see with torch's
	@MODELYARD_PICTURES=1 $(BIN)/python -m pytest tests/server/answers/test_trained_pictures.py tests/server/answers/test_seen_in_pictures.py

growth: setup ## Measure how export, memory, start and speed grow with model, texts and callers, and plot it
	@$(BENCH)bench_growth $(BENCH_OPTIONS)

memory: setup ## Measure what an export and an instance hold, by engine and precision
	@$(BENCH)measure_memory $(BENCH_OPTIONS)

bench-pictures: setup ## Measure photo in, labels out beside FastAPI, Pillow and ONNX Runtime, at 1 and 8 connections
	@$(BENCH)bench_pictures $(BENCH_OPTIONS)

hostile-pictures: setup ## Send 500 malformed and hostile pictures among good ones, and see each refused by itself
	@MODELYARD_HOSTILE_PICTURES=500 $(BIN)/python -m pytest tests/server/answers/test_pictures.py -k hostile

lint: setup ## Check format, style and types
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy --no-error-summary
	@# One run each: Triton loads the files of every backend as modules at the top, and each has a `model`.
	@for folder in backends/*/; do $(BIN)/mypy --no-error-summary $$folder*.py || exit; done

bench: setup $(UV) ## Measure ours beside other servers on real text; make bench BENCH_OPTIONS=--quick in 3 minutes
	@$(BENCH)bench_serving $(BENCH_OPTIONS)

bench-gpu: setup ## Measure published sentence embeddings in ONNX Runtime on a GPU: BENCH_OPTIONS="REPOSITORY NAME ..."
	@$(BENCH)bench_gpu $(BENCH_OPTIONS)

memory-gpu: setup ## Measure what ONNX Runtime holds of a GPU: BENCH_OPTIONS="REPOSITORY NAME ..."
	@$(BENCH)measure_gpu_memory $(BENCH_OPTIONS)

bench-tune: setup ## Measure how near `tune` comes to a full sweep of the same ways
	@$(BENCH)bench_tune $(BENCH_OPTIONS)

test-vllm: setup ## Write texts with vLLM under the real tritonserver; needs a GPU, vLLM and numpy below 2
	@$(BIN)/python -m pytest tests/gpu

bench-consolidate: setup $(VENV)/trainers ## Measure consolidate beside DeepSpeed's script and cp
	@$(BENCH)bench_consolidate $(BENCH_OPTIONS)

targets: setup ## Measure again what each target's ONNX Runtime loads
	@$(BENCH)bench_targets

fuzz: setup ## Feed the checkpoint readers 40,000 hostile files, and every HTTP operation 2,000 requests
	@$(BENCH)fuzz_torch_zip --inputs 40000
	@MODELYARD_FUZZ=2000 $(BIN)/python -m pytest tests/server/hostile/test_fuzz_http.py

PROMPTS ?= 20

streams: setup $(VENV)/trainers ## Write texts of PROMPTS (20) prompts over 16 streams, some of which leave: transformers' own?
	@MODELYARD_STREAMS=$(PROMPTS) $(BIN)/python -m pytest tests/server/answers/test_generation.py -k transformers_writes

kills: setup ## Kill every kind of process 20 times under load, and see it come back
	@MODELYARD_KILLS=20 $(BIN)/python -m pytest tests/server/healing/test_healing.py tests/server/tritonserver/test_stillness.py -s

neighbours: setup ## Measure a one-word caller's wait beside callers of texts that are dear to tokenise
	@$(BENCH)neighbours

SOAK_MINUTES ?= 20

soak: setup ## Overload the demo's server for SOAK_MINUTES (20), then rest it: errors, latency, memory
	@$(BENCH)soak --minutes $(SOAK_MINUTES)

ACTIVATIONS ?= 100
KILLS ?= 200
SERVERS     ?= 1

soak-rollouts: setup ## Activate two versions in turns under load ACTIVATIONS (100) times: failures, mixed answers, latency
	@$(BENCH)soak_rollouts --activations $(ACTIVATIONS) --servers $(SERVERS)

kill-anywhere: setup ## Kill what exports, activates, copies, prunes and serves at KILLS (200) random moments: faults left behind
	@$(BENCH)kill_anywhere --kills $(KILLS)

soak-cluster: setup ## Kill, drain and roll three servers behind HAProxy under 32 clients: failures, and what one to three answer
	@$(BENCH)soak_cluster $(SCALE_OPTIONS)

scale: setup ## Measure what a request costs and what three servers answer, and plan for 10^4 and 10^6 requests a second
	@mkdir -p .cache/scale
	@$(BENCH)request_cost --json .cache/scale/cost.json
	@$(BENCH)soak_cluster --json .cache/scale/cluster.json $(SCALE_OPTIONS)
	@$(BENCH)simulate_scale --cost .cache/scale/cost.json --measured .cache/scale/cluster.json

soak-lines: setup ## Answer a million lines while client and server are killed, and versions rolled: rows, repeats, memory
	@$(BENCH)soak_lines $(BENCH_OPTIONS)

REQUESTS ?= 10000

soak-generate: setup ## Send REQUESTS (10,000) of every kind to a model that writes text: refusals, memory, neighbours' texts
	@$(BENCH)soak_generate --requests $(REQUESTS)

bench-generate: setup ## Measure text generation beside the bare engine, transformers and ctranslate2; BENCH_OPTIONS=--quick
	@$(BENCH)bench_generate $(BENCH_OPTIONS)

wheel: setup ## Build the distribution into dist/
	@rm -rf build dist
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

LOCK = $(UV) pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-emit-index-url --no-annotate \
	--no-emit-package torch --custom-compile-command 'make lock' --constraint requirements/torch.txt $(LOCK_OPTIONS)

lock: $(UV) ## Resolve requirements/*.txt anew; LOCK_OPTIONS=--upgrade takes the newest of everything
	@$(LOCK) pyproject.toml --extra dev --output-file requirements/dev.txt
	@for extra in server export gateway; do \
		$(LOCK) pyproject.toml --extra $$extra --constraint requirements/dev.txt --output-file requirements/$$extra.txt || exit; \
	done
	@for name in build trainers containers; do \
		$(LOCK) requirements/$$name.in --constraint requirements/dev.txt --output-file requirements/$$name.txt || exit; \
	done
	@# Of the environments of `make test-doors`, `make test-batch` and `make test-stores`, which have nothing else.
	@$(LOCK) requirements/doors.in --output-file requirements/doors.txt
	@for name in batch stores; do \
		$(LOCK) requirements/$$name.in --constraint requirements/dev.txt --output-file requirements/$$name.txt || exit; \
	done
	@# Of these nothing is used that would need what they depend on.
	@for name in gpu stubs kubernetes; do \
		$(LOCK) requirements/$$name.in --constraint requirements/dev.txt --no-deps --output-file requirements/$$name.txt || exit; \
	done

	@# Environments of peers: all that they hold, without hashes; torch is installed as requirements/torch.txt says.
	@for wanted in tests/benches/peers/*.in; do \
		$(UV) pip compile --quiet --universal --python-version 3.10 --no-emit-index-url --no-annotate \
			--no-emit-package torch --custom-compile-command 'make lock' --constraint requirements/torch.txt $(LOCK_OPTIONS) \
			$$wanted --output-file $${wanted%.in}.txt && sed -i -E '/^(nvidia-cu|nvidia-n|cuda-|triton==)/d' $${wanted%.in}.txt || exit; \
	done

clean: ## Remove the environment and the caches; published models stay, and the key of a server that may be running
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find .cache -mindepth 1 -maxdepth 1 ! -name control.key -exec rm -rf {} + 2>/dev/null || true
