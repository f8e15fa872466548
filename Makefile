# The one door for developers: `make help`.
PYTHON ?= python3
UV := .venv/bin/uv
UV_VERSION := 0.13.8
BIN := .venv/bin
LOCK := requirements/cpu.lock
OVERRIDES := requirements/overrides.txt
# What torch would bring for GPUs, 2.7 GB. Its small libraries cudart, cupti and cufile stay: CPUs call them too.
CUDA_PACKAGES := triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-nvrtc nvidia-cudnn-cu13 \
	nvidia-cufft nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink \
	nvidia-nvshmem-cu13 nvidia-nvtx
STAMP := .venv/installed
PEERS := .venv-peers
MLFLOW := .venv-mlflow
TEMPLATES := .venv-trl
LM_EVAL := .venv-lm-eval
TRL := 1.16.0
TRL_WITH_PPO := 1.12.0 # the last one that has it
VERL := verl==0.9.1 tensordict==0.15.3 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0 pyvers==0.2.3
UNIT := $(wildcard $(addprefix tests/,api mapper examples trainer/ops trainer/unit))
PYTEST := $(BIN)/python -m pytest
BEGAN := $(shell date +%s)
# What `make house` shows of the last runs of a target.
NOTE_SECONDS = mkdir -p .pytest_cache && echo "make $@ $$(($$(date +%s) - $(BEGAN)))" >> .pytest_cache/seconds

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: docs help install demo cluster-demo test test-unit test-cluster test-chaos cluster-programs test-full images wheel lint house format generate bench bench-peers mlflow-server lm-eval accept lock clean

# pytest keeps its rewritten modules for the next run.
unexport PYTHONDONTWRITEBYTECODE
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export UV_HTTP_TIMEOUT ?= 300
test test-unit test-cluster test-chaos test-full accept: export OMP_NUM_THREADS := 1
test test-unit test-cluster test-chaos test-full accept: export HF_HUB_OFFLINE := 1
test test-unit test-cluster test-chaos test-full accept: export TOKENIZERS_PARALLELISM := false
test test-unit test-cluster test-chaos test-full accept: export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO := 0
# Ray gives its workers niceness 15: beside the tests of the cluster they would wait.
test test-chaos test-full: export RAY_worker_niceness := 0

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv with the locked versions and this project in it

# The stamp comes last: an install that fails half-way is taken up again by the next call.
$(STAMP): $(LOCK) $(OVERRIDES) pyproject.toml | $(UV)
	@rm -f $@
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python -r $(LOCK) --override $(OVERRIDES)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q crds operator trainer_image
	@$(BIN)/rlhf --help > /dev/null
	@touch $@

$(UV):
	@$(PYTHON) -c '' 2> /dev/null || { echo "error: $(PYTHON) does not run; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; install the package python3-venv" >&2; exit 1; }
	@echo "creating .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

demo: install ## Run the whole RLHF chain on this machine (examples/01-helpful-ppo.yaml)
	$(BIN)/rlhf run examples/01-helpful-ppo.yaml

cluster-demo: ## The same chain on a real Kubernetes: chart, operator, Ray and trainer in pods (needs root and Go; KEEP=1: it stays)
	@$(PYTHON) -B -c 'from tests.cluster import build as b, capabilities as c; exit(c.pods_cannot_run() or b.no_go() or 0)'
	@$(MAKE) --no-print-directory cluster-programs
	$(BIN)/python -m tests.cluster.demo --output runs/cluster-demo $(if $(KEEP),--keep)

# Groups of tests run side by side (tests/conftest.py).
test: lint $(TEMPLATES)/installed ## Lint and all tests but the slow ones and those on a real Kubernetes
	$(BIN)/python -m tests.cluster.build helm
	@prepared=$$(($$(date +%s) - $(BEGAN))); \
	trap 'echo "make test: $$(($$(date +%s) - $(BEGAN))) s, $$prepared of them for installing, lint and building"' EXIT; \
	RLHF_UNIT_TESTS="$(UNIT)" $(PYTEST) -n 3 --no-loadscope-reorder -m "not slow and not gpu" \
		--durations=10 --ignore=tests/cluster
	@$(NOTE_SECONDS)

test-unit: install ## The quick tests, without Ray and vLLM (about a minute and a half)
	$(PYTEST) -n 2 -m "not slow and not gpu" $(UNIT)
	@$(NOTE_SECONDS)

test-cluster: cluster-programs ## The tests on a real Kubernetes of this machine, but the slow ones (level pods needs root)
	$(PYTEST) -n 2 --no-loadscope-reorder -m "not slow and not gpu" --durations=10 tests/cluster
	@$(NOTE_SECONDS)

test-chaos: install ## Every fault of a run at each of its places: tests/README.md (about half an hour)
	$(PYTEST) -rP --durations=10 tests/trainer/chain/test_nothing_is_lost_by_a_fault.py

cluster-programs: install ## Build Kubernetes and KubeRay for the tests, once (needs Go; 10 minutes or more on 2 cores)
	$(BIN)/python -m tests.cluster.build

# Tests whose ranks compute together by gloo; under DETAIL a rank that is lost shows two minutes later.
GLOO := checkpoint controller environments hybrid_engine placement rewards training
LOST := tests/trainer/placement/test_a_lost_generator_is_replaced.py
test-full: lint cluster-programs mlflow-server lm-eval $(TEMPLATES)/installed ## All tests, with the long ones (builds Kueue too)
	$(BIN)/python -m tests.cluster.build kueue
	$(PYTEST) -m "not gpu" --durations=20
	TORCH_DISTRIBUTED_DEBUG=DETAIL $(PYTEST) -m "not gpu and not slow" $(addprefix tests/trainer/,$(GLOO)) --ignore $(LOST)

images: ## Build the images of the operator and of the trainer for CPUs, by Docker or buildah (BASE=... IMAGES=operator)
	@$(PYTHON) -B -m images.build $(IMAGES)

wheel: | $(UV) ## Build the package into dist
	$(UV) build --quiet --wheel --out-dir dist

# In a new clone mypy finds there what it knows of the packages, which is most of a minute of work.
lint: export MYPY_CACHE_DIR = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rlhf-operator/mypy
lint: install ## Check style, types, floors and words
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.repo.words

house: install ## Print the measures of the code: words, a job's way, complexity, lines, seconds of the last tests
	@$(BIN)/python -m tests.repo.house

format: install ## Format the code and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: install ## Build the site of docs/ into site/; a broken link or a page without a place fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "site/index.html; $(BIN)/python -m http.server --directory site shows it with its search"

generate: install ## Write the CRD, docs/api-reference.md, docs/status.md, and the chart's copy, version and dashboards anew, and the pages of metrics
	$(BIN)/python -m helm.crd
	$(BIN)/python -m helm.dashboards

bench: install ## Measure the steps of GRPO and PPO beside the limit of this machine (most of an hour)
	$(BIN)/python benchmarks/step.py

bench-peers: $(PEERS)/installed ## Measure the same steps in TRL beside ours (puts TRL into .venv-peers)
	$(BIN)/python benchmarks/peers.py

# TRL and verl (for tests.accept.corrections), and what only they need; torch, transformers and datasets are those of .venv, so both run the same ones.
$(PEERS)/installed: $(STAMP)
	$(UV) venv --quiet --clear --python $(BIN)/python $(PEERS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$(UV) pip install --quiet --python $(PEERS)/bin/python --no-deps accelerate==1.15.0 trl==$(TRL)
	$(UV) pip install --quiet --python $(PEERS)/bin/python --no-deps --target $(PEERS)/ppo trl==$(TRL_WITH_PPO)
	$(UV) pip install --quiet --python $(PEERS)/bin/python --no-deps $(VERL)
	@touch $@

# The chat templates of TRL, which tests read; nothing imports it.
$(TEMPLATES)/installed: $(STAMP)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(TEMPLATES) trl==$(TRL)
	@touch $@

mlflow-server: $(MLFLOW)/installed ## Put MLflow's server, which tests of outputs.mlflow start, into .venv-mlflow

# The server of the client's version and what only it needs; the rest is that of .venv, whose pyarrow is too new for its pins.
$(MLFLOW)/installed: $(STAMP)
	$(UV) venv --quiet --clear --python $(BIN)/python $(MLFLOW)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(MLFLOW)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$(UV) pip install --quiet --compile-bytecode --python $(MLFLOW)/bin/python --no-deps \
		mlflow==$$(sed -n 's/^mlflow-skinny==//p' $(LOCK)) alembic==1.20.1 graphene==3.4.3 graphql-core==3.2.14 \
		graphql-relay==3.2.0 huey==3.5.4 mako==1.4.3 sqlalchemy==2.1.9
	@touch $@

lm-eval: $(LM_EVAL)/installed ## Put lm-eval, which a test of `rlhf serve` runs, into .venv-lm-eval

# What it needs beside the packages of .venv.
$(LM_EVAL)/installed: $(STAMP) requirements/lm-eval.lock
	$(UV) venv --quiet --clear --python $(BIN)/python $(LM_EVAL)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(LM_EVAL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$(UV) pip install --quiet --compile-bytecode --python $(LM_EVAL)/bin/python --no-deps -r requirements/lm-eval.lock
	@touch $@

accept: cluster-programs $(TEMPLATES)/installed $(PEERS)/installed ## Run the golden path and print what was measured as one JSON (ROWS=run,resume: some rows; SCRIPTS=FOLDERS: scripts to import)
	@$(BIN)/python tests/accept/accept.py

lock: COMPILE = $(UV) pip compile --quiet --no-annotate --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make lock"
lock: | $(UV) ## Write the locked versions anew after a change of pyproject.toml (empty a lock first to get the newest)
	$(COMPILE) pyproject.toml requirements/cpu.in --extra trainer --extra cpu --extra dev \
		--override $(OVERRIDES) --python-version 3.11 --output-file $(LOCK)
	$(COMPILE) pyproject.toml --extra operator --constraint $(LOCK) --python-version 3.11 \
		--output-file requirements/operator.lock
	$(COMPILE) pyproject.toml requirements/cpu.in --extra trainer --extra cpu --extra s3 --extra gs --extra trackers \
		--override $(OVERRIDES) --constraint $(LOCK) --python-version 3.11 \
		$(addprefix --no-emit-package ,$(CUDA_PACKAGES)) --output-file requirements/trainer-cpu.lock
	$(COMPILE) pyproject.toml requirements/gpu.in --extra trainer --extra gpu --extra s3 --extra gs --extra trackers \
		--python-version 3.12 --output-file requirements/gpu.lock
	$(COMPILE) requirements/image-tools.in --python-version 3.11 --output-file requirements/image-tools.lock

clean: ## Delete caches and build files (.venv and runs stay)
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name .venv -prune -o \( -name '*.egg-info' -o -name __pycache__ \) -type d -exec rm -rf {} +
