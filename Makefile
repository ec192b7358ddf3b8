# `make help` lists the targets. Everything runs in .venv, which scripts/install.sh makes.
WORKERS ?= 3
ENGINE ?= vllm
FRONT ?= python
PART_MB ?= 60
PORT ?= 8000
POLICY ?=
VERSION ?= 0.31.0

PYTHON := .venv/bin/python
TAILRACE := .venv/bin/tailrace

# The tests start hundreds of processes: without bytecode, each compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install up down test mutants test-features test-models test-vllm test-ranks test-upgrade lint format protos sbom bundle check-gpu docs soak bench-stream bench-transfer bench-swap \
	bench-control bench-scale \
	bench-decisions bench-policies bench-shards bench-cache bench-cache-ahead bench-cache-vllm bench-cache-live bench-cache-router bench-pull bench-real bench-live bench-replays bench-overload bench-overload-simulated bench-validation bench-simulation bench-etcd strangers chaos fuzz claims

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables for up: WORKERS=$(WORKERS) ENGINE=$(ENGINE) FRONT=$(FRONT) PORT=$(PORT) POLICY=$(POLICY)"

install: ## Set up .venv (FRONT=rust: with vLLM's Rust front end)
	@scripts/install.sh $(if $(filter rust,$(FRONT)),--rust)

up: install ## Start a local cluster and print a working curl command
	@$(TAILRACE) up --workers $(WORKERS) --engine $(ENGINE) --front $(FRONT) --port $(PORT) \
		$(if $(POLICY),--policy $(POLICY))

down: ## Stop the local cluster
	@if [ -x $(TAILRACE) ]; then $(TAILRACE) down; else echo "no local cluster runs here"; fi

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

format: install ## Format the code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

protos: ## Generate tailrace/v1 from protos/
	$(PYTHON) scripts/gen_protos.py

docs: install ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

sbom: install ## Write dist/sbom-*.json (CycloneDX) for the packages of the lock files
	@mkdir -p dist
	@for name in control simulated gpu; do \
		$(PYTHON) -m cyclonedx_py requirements deploy/locks/$$name.txt --pyproject pyproject.toml -o dist/sbom-$$name.json; \
	done; ls -l dist/sbom-*.json

bundle: install ## Build an offline installation in dist/bundle, in files of PART_MB (ENGINE=cpu, BUNDLE_PYTHON=3.12, CONTENTS=, TORCH=host)
	$(PYTHON) -m scripts.bundle --part-mb $(PART_MB) $(if $(filter cpu,$(ENGINE)),--engine cpu) \
		$(if $(BUNDLE_PYTHON),--python $(BUNDLE_PYTHON)) $(if $(CONTENTS),--contents $(CONTENTS)) \
		$(if $(TORCH),--torch $(TORCH))

check-gpu: install ## Run the checks that need a GPU (PART=transfer|serving|migration|lengths|profile, ARGS=)
	$(PYTHON) -m benchmarks.gpu $(PART) $(ARGS)

soak: install ## Run the slow tests: random kills, partitions and migrations
	$(PYTHON) -m pytest -m slow --timeout 1800

mutants: install ## Mutation testing of the pure modules (ARGS="--count 20 --seed 2 MODULE")
	@$(PYTHON) -c 'import cosmic_ray' 2>/dev/null || $(PYTHON) -m pip install -q --disable-pip-version-check -e '.[mutants]'
	$(PYTHON) -m tests.mutants $(ARGS)

test-features: install ## Speculation, adapters, embedding, images: migrated streams against undisturbed ones (ARGS="--resume adapters")
	$(PYTHON) -m tests.features $(ARGS)

test-models: install ## Every architecture in every run configuration of vLLM, each stream migrated twice (ARGS=--resume)
	$(PYTHON) -m tests.models $(ARGS)

test-vllm: ## Run the vLLM workers' tests on another vLLM version, in a separate environment (VERSION=0.31.0)
	@scripts/install.sh --vllm $(VERSION)
	build/vllm-$(VERSION)/bin/python -m worker_agent.engine.vllm.internals
	build/vllm-$(VERSION)/bin/python -m pytest -m "vllm and not slow" $(or $(TESTS),tests/worker tests/wire) $(ARGS)

test-upgrade: install ## Upgrade a running local cluster from an older revision, and roll back, under load (FROM=REVISION)
	@test -n "$(FROM)" || { echo "from which revision? make test-upgrade FROM=v0.1.0" >&2; exit 2; }
	$(PYTHON) -m tests.upgrade $(FROM) $(ARGS)

test-ranks: ## Engines with two ranks, on one machine and on two (namespaces), and data-parallel ones: kill -9 of a rank during a stream and in each step of a migration
	@scripts/install.sh --rust
	$(PYTHON) -m pytest -m slow tests/e2e/test_ranks.py tests/e2e/test_nodes.py tests/e2e/test_data_parallel.py \
		tests/worker/test_vllm_ranks.py --timeout 1800

bench-stream: ## Throughput through the front ends against plain vllm serve (ARGS="--against clear": overhead of mutual TLS)
	@scripts/install.sh --rust
	$(PYTHON) -m benchmarks.stream $(ARGS)

bench-transfer: install ## KV transfer rate and migration pause
	$(PYTHON) -m benchmarks.transfer

bench-swap: install ## Step time of a swap to host memory on a real worker
	$(PYTHON) -m benchmarks.swap

bench-scale: ## 100 simulated workers, 1,000 streams
	@scripts/install.sh --rust
	$(PYTHON) -m benchmarks.scale

bench-decisions: install ## Decision latency of each policy at 16 to 1,024 instances, and of the prefix index (ARGS=--only=cache)
	$(PYTHON) -m benchmarks.decisions $(ARGS)

bench-control: install ## Placements while 1,024 synthetic instances report to a real monitor (ARGS="--instances 4096 --policies tailrace")
	$(PYTHON) -m benchmarks.control $(ARGS)

bench-validation: ## A real worker, profiled and loaded, against the simulator
	@scripts/install.sh --rust
	$(PYTHON) -m experiments.validation $(ARGS)

bench-simulation: install ## Run time of simulations (TAILRACE_DATA=folder with the public data)
	$(PYTHON) -m benchmarks.simulation $(if $(TRACE),--trace $(TRACE))

bench-policies: install ## Every policy on every paper's workload and on a mix (TAILRACE_DATA=folder with the public data, ARGS=--quick)
	$(PYTHON) -m experiments.policies $(ARGS)

bench-shards: install ## A fleet divided among 2 to 16 schedulers, and placement leases, against one scheduler, simulated (ARGS=--quick)
	$(PYTHON) -m experiments.shards $(ARGS)

bench-cache: install ## Prefix-aware placement on Mooncake's conversations, simulated (TAILRACE_DATA as above)
	$(PYTHON) -m experiments.cache.placement $(ARGS)

bench-cache-ahead: install ## Hot prefixes copied to a second instance in advance, simulated
	$(PYTHON) -m experiments.cache.ahead $(ARGS)

bench-cache-vllm: install ## The simulator's prefix cache against real vLLM's, request by request
	$(PYTHON) -m experiments.cache.against_vllm $(ARGS)

bench-cache-router: install ## Conversations on Tailrace and on plain vLLM servers behind vLLM's router (ARGS=--router DIR)
	$(PYTHON) -m benchmarks.cache.router $(ARGS)

bench-pull: ## A prefix pulled from another real vLLM worker against computing it
	@scripts/install.sh --rust
	$(PYTHON) -m benchmarks.cache.pull $(ARGS)

bench-cache-live: ## Conversations on two real vLLM workers, with and without prefix-aware placement
	@scripts/install.sh --rust
	$(PYTHON) -m benchmarks.cache.policies $(ARGS)

bench-real: ## PASCAL, Arrow, ARES, CascadeInfer and policy switching on real vLLM workers, with every answer checked (ARGS=--quick)
	@scripts/install.sh --rust
	$(PYTHON) -m experiments.live.vllm $(ARGS)

bench-overload: install ## Effect of overload by one tenant, and by all, on the served requests (ARGS="--parts 1")
	$(PYTHON) -m benchmarks.overload $(ARGS)

bench-overload-simulated: install ## A tenant beyond its limit beside another, in the simulator
	$(PYTHON) -m experiments.overload $(ARGS)

bench-live: install ## Slices of traces on live simulated engines and in the simulator (TAILRACE_DATA as above, ARGS=--quick)
	$(PYTHON) -m experiments.live.simulated $(ARGS)

bench-replays: install ## Live runs under each policy, recorded, and replayed with all policies
	$(PYTHON) -m experiments.live.replays $(ARGS)

bench-etcd: install ## Leaders, views and streams while one of three etcd members fails (ARGS=--no-streams)
	$(PYTHON) -m tests.etcd_faults $(ARGS)

strangers: ## Try etcd, the users' HTTP port and every port of a cluster as strangers, and capture its links (ARGS=--http-only)
	@scripts/install.sh --rust
	$(PYTHON) -m tests.strangers $(ARGS)

fuzz: ## Every record in etcd, gRPC method and message stream with random and corrupted input (ARGS="--inputs 200 --seed 2")
	@scripts/install.sh --rust
	$(PYTHON) -m tests.fuzz $(ARGS)

chaos: ## A cluster under random faults (root; ARGS="--faults 300 --seed 1 --workers 8 --streams 30 -o json")
	@scripts/install.sh --rust
	$(PYTHON) -m tests.chaos $(ARGS)

claims: install ## Reproduce every claim of the papers, with JSON and a page in benchmarks/results (TAILRACE_DATA as above)
	$(TAILRACE) claims $(if $(TAILRACE_DATA),--traces $(TAILRACE_DATA)/traces) \
		--save benchmarks/results/claims.json --report benchmarks/results/claims.html
