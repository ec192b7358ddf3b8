# `make help` lists the targets. Everything runs in .venv, which scripts/install.sh makes.
WORKERS ?=
ENGINE ?= vllm
FRONT ?= auto
PART_MB ?= 60
PORT ?= 8000
POLICY ?=
VERSION ?= 0.31.0

PYTHON := .venv/bin/python
TAILRACE := .venv/bin/tailrace

# The tests start hundreds of processes: without bytecode, each compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install up down \
	test lint soak test-ranks test-vllm test-features test-models test-clients test-upgrade mutants \
	chaos fuzz strangers \
	bench-stream bench-transfer bench-decisions bench-control bench-simulation bench-overload check-gpu \
	claims \
	docs bundle release

# Lines `##@ TITLE` begin a group.
help:
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "variables for up: WORKERS=$(WORKERS) ENGINE=$(ENGINE) FRONT=$(FRONT) PORT=$(PORT) POLICY=$(POLICY)"

##@ A local cluster

install: ## Set up .venv (FRONT=python: without vLLM's Rust front end)
	@scripts/install.sh $(if $(filter auto,$(FRONT)),--rust-if-possible,$(if $(filter python,$(FRONT)),,--rust))

up: install ## Start a local cluster and print a working curl command
	@$(TAILRACE) up $(if $(WORKERS),--workers $(WORKERS)) --engine $(ENGINE) --front $(FRONT) --port $(PORT) \
		$(if $(POLICY),--policy $(POLICY))

down: ## Stop the local cluster
	@if [ -x $(TAILRACE) ]; then $(TAILRACE) down; else echo "no local cluster runs here"; fi

##@ Tests

test: ## Run the tests
	@scripts/install.sh --rust
	@# Four at a time, on two cores: much of it is waiting for processes to start. A file's tests share its fleet, and
	@# those of several files the one of vLLM engines (tests/conftest.py). A test that pytest's timeout cannot end, as it
	@# waits in C or in its teardown, leaves the stacks of all threads and ends its process, and that ends the run.
	$(PYTHON) -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 12 --max-worker-restart 0 \
		-o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true

lint: install ## Check style, types and import directions
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports

soak: install ## Run the slow tests: random kills, partitions and migrations
	$(PYTHON) -m pytest -m slow --timeout 1800

test-ranks: ## Engines with two ranks, on one machine and on two (namespaces), and data-parallel ones: kill -9 of a rank during a stream and in each step of a migration
	@scripts/install.sh --rust
	$(PYTHON) -m pytest -m slow tests/e2e/test_ranks.py tests/e2e/test_nodes.py tests/e2e/test_data_parallel.py \
		tests/worker/test_vllm_ranks.py --timeout 1800

test-vllm: ## Run the vLLM workers' tests on another vLLM version, in a separate environment (VERSION=0.31.0)
	@scripts/install.sh --vllm $(VERSION)
	build/vllm-$(VERSION)/bin/python -m worker_agent.engine.vllm.internals
	build/vllm-$(VERSION)/bin/python -m pytest -m "vllm and not slow" $(or $(TESTS),tests/worker tests/wire) $(ARGS)

test-features: install ## Speculation, adapters, embedding, images: migrated streams against undisturbed ones (ARGS="--resume adapters")
	$(PYTHON) -m tests.features $(ARGS)

test-models: install ## Every architecture in every run configuration of vLLM, each stream migrated twice (ARGS=--resume)
	$(PYTHON) -m tests.models $(ARGS)

test-clients: install ## Real clients (aiperf, Codex, lm-eval, ...) against a fleet with moves and a kill, and plain vllm serve (ARGS="--resume openai -o json")
	$(PYTHON) -m tests.clients $(ARGS)

test-upgrade: install ## Upgrade a running local cluster from an older revision, and roll back, under load (FROM=REVISION)
	@test -n "$(FROM)" || { echo "from which revision? make test-upgrade FROM=v0.1.0" >&2; exit 2; }
	$(PYTHON) -m tests.upgrade $(FROM) $(ARGS)

mutants: install ## Mutation testing of the pure modules (ARGS="--count 20 --seed 2 MODULE")
	@$(PYTHON) -c 'import cosmic_ray' 2>/dev/null || $(PYTHON) -m pip install -q --disable-pip-version-check -e '.[mutants]'
	$(PYTHON) -m tests.mutants $(ARGS)

##@ Checks under faults, invalid input and attack

chaos: ## A cluster under random faults (root; ARGS="--faults 300 --seed 1 --workers 8 --streams 30 -o json")
	@scripts/install.sh --rust
	$(PYTHON) -m tests.chaos $(ARGS)

fuzz: ## Every record in etcd, gRPC method and message stream with random and corrupted input (ARGS="--inputs 200 --seed 2")
	@scripts/install.sh --rust
	$(PYTHON) -m tests.fuzz $(ARGS)

strangers: ## Try etcd, the users' HTTP port and every port of a cluster as strangers, and capture its links (ARGS=--http-only)
	@scripts/install.sh --rust
	$(PYTHON) -m tests.strangers $(ARGS)

##@ Benchmarks; further ones are run as python -m benchmarks.NAME: transfer, simulation, scale, cache.pull, cache.router

bench-stream: ## Throughput through the front ends against plain vllm serve (ARGS="--against clear": overhead of mutual TLS)
	@scripts/install.sh --rust
	$(PYTHON) -m benchmarks.stream $(ARGS)

# Not listed, so that the list fits on a screen.
bench-transfer: install
	$(PYTHON) -m benchmarks.transfer

bench-simulation: install
	$(PYTHON) -m benchmarks.simulation $(if $(TRACE),--trace $(TRACE))

bench-decisions: install ## Decision latency of each policy at 16 to 1,024 instances, and of the prefix index (ARGS=--only=cache)
	$(PYTHON) -m benchmarks.decisions $(ARGS)

bench-control: install ## Placements while 1,024 synthetic instances report to a real monitor (ARGS="--instances 4096 --policies tailrace")
	$(PYTHON) -m benchmarks.control $(ARGS)

bench-overload: install ## Effect of overload by one tenant, and by all, on the served requests (ARGS="--parts 1")
	$(PYTHON) -m benchmarks.overload $(ARGS)

check-gpu: install ## Run the checks that need a GPU (PART=transfer|serving|migration|lengths|profile, ARGS=)
	$(PYTHON) -m benchmarks.gpu $(PART) $(ARGS)

##@ Experiments; further ones are run as python -m experiments.NAME

claims: install ## Reproduce every claim of the papers, with JSON and a page in benchmarks/results (TAILRACE_DATA=folder with the public data)
	$(TAILRACE) claims $(if $(TAILRACE_DATA),--traces $(TAILRACE_DATA)/traces) \
		--save benchmarks/results/claims.json --report benchmarks/results/claims.html

##@ Documentation and release

docs: install ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

release: install ## Wheel, locks, SBOM, changelog and upgrade notes of the version in dist/ (refuses a dirty tree)
	@$(PYTHON) -m scripts.release

bundle: install ## Build an offline installation in dist/bundle, in files of PART_MB (ENGINE=cpu, BUNDLE_PYTHON=3.12, CONTENTS=, TORCH=host)
	$(PYTHON) -m scripts.bundle --part-mb $(PART_MB) $(if $(filter cpu,$(ENGINE)),--engine cpu) \
		$(if $(BUNDLE_PYTHON),--python $(BUNDLE_PYTHON)) $(if $(CONTENTS),--contents $(CONTENTS)) \
		$(if $(TORCH),--torch $(TORCH))
