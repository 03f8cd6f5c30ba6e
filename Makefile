# quickstart and test are the two commands of the README; both set .venv up first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

QUICKSTART := recipes/finetuning.py --enable_fsdp --low_cpu_fsdp

.PHONY: quickstart test test-all lint docs clean

# One or two GPUs serve one process each; without a GPU, two processes share the CPU's cores (gloo). torchrun would give
# each process one thread, and say so, unless OMP_NUM_THREADS is set.
quickstart: $(VENV)/.installed
	@set -e; \
	set -- $$($(BIN)/python -c 'import torch; print(torch.cuda.device_count(), max(1, torch.get_num_threads() // 2))'); \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$2} PATH="$(CURDIR)/$(BIN):$$PATH"; \
	if [ "$$1" -eq 1 ]; then ranks=1; else ranks=2; fi; \
	set -- torchrun --nproc_per_node $$ranks $(QUICKSTART); \
	echo "$$@"; \
	exec "$$@"

# Two workers, a file to each: a test mostly waits, for ranks that wait for each other. The slow ones have time limits and
# want the machine for themselves.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-all: test
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src recipes

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict --quiet

$(VENV)/.installed: requirements.txt setup.py
	@command -v $(PYTHON) >/dev/null || \
	  { echo "error: there is no $(PYTHON). Name a Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: $(PYTHON) is Python %d.%d, and 3.11 or newer is needed.\n       Name another: make $(MAKECMDGOALS) PYTHON=python3.12" % v[:2])'
	@echo "installing requirements.txt into $(VENV): some minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.txt
	@$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@$(PIP) install -r requirements-dev.txt
	@touch $@

# Leaves output/, which holds people's runs.
clean:
	rm -rf $(VENV) build site src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
