# Everything a newcomer or a CI job does with this project. Each target makes sure of .venv first; nothing touches the
# system's Python.

NODES ?= 2
NPROC ?= 2
EXPERIMENT ?= digits
BACKEND ?= auto
SERVICE ?= ddp-cpu
# `make chaos DRILL=kill SEED=1`; a fresh seed is drawn and printed without one.
DRILL ?= standard
SEED ?=
# `make test-newest RELEASE=2.14.1`
RELEASE ?=
# `make soak ROUNDS=5`
ROUNDS ?= 20
# `make test-rotation SECONDS=240`, SLICE=3/7, or SLICE=today: another seventh on each day of the week
SECONDS ?=
SLICE ?=
# `make test-foreign WORKERS=2`: so many of other people's models at a time; of `make portable-runs`, trainings.
WORKERS ?= 1
# Further options of `ddp train`, such as OPTIONS="--set epochs=2".
OPTIONS ?=
# `make portable-digests CONFIRM=1`
CONFIRM ?=
# `make portable-runs ON="here Haswell"`
ON ?=
# `make setup TORCH=cpu` or TORCH=cuda; without it, CUDA's where there is an NVIDIA driver, else the CPU's.
TORCH ?=

BIN := .venv/bin

# Tests without the marker gpu are of the CPU, whose results they compare with: they must not find a GPU. They start
# hundreds of processes, each of which would compile what it imports where Python is told to keep no compiled file.
NO_GPU := CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE=

# What the image says about the code in it: build arguments of compose.yaml.
export GIT_COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
export GIT_DIRTY ?= $(shell if changes=$$(git status --porcelain 2>/dev/null); then test -z "$$changes" && echo false || echo true; else echo unknown; fi)
export VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# Beside :latest an image is tagged with the version, and with version and commit only if it has just what was committed.
version_tags = $(VERSION) $(if $(filter false,$(GIT_DIRTY)),$(VERSION)-$(shell git rev-parse --short HEAD))
tag_image = [ -n "$$IMAGE_TAG" ] || for tag in $(version_tags); do docker tag $(1):latest $(1):$$tag; done

.DEFAULT_GOAL := help
.PHONY: help setup cpu-cluster up image image-cpu image-test test test-full test-rotation test-oldest test-newest test-pythons test-extras test-streams test-foreign soak test-docker test-cluster test-gpu gpu-check test-all lint compare verify-layouts chaos claims report site portable-digests portable-runs advisories uv-lock dist sbom sbom-cpu clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  cpu-cluster takes NODES=2 NPROC=2 EXPERIMENT=digits BACKEND=auto|docker|local OPTIONS=\"--set epochs=2\""

setup: ## Make .venv from constraints.txt, with torch for CUDA or the CPU (says which, and why): TORCH=cpu|cuda INSTALLER=uv
	@for python in $(or $(PYTHON),python3 python3.12 python3.13 python3.14 python3.11); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then exec $$python tools/environment.py; fi; done; \
	echo "setup: no Python 3.11 or later with venv found; install one (Debian: apt install python3-venv) or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 2

cpu-cluster: setup ## Train on NODES x NPROC processes over gloo, after the single-process baseline, and compare
	@$(BIN)/python -m ddp_lab.cluster up --backend $(BACKEND) --nodes $(NODES) --nproc $(NPROC) --experiment $(EXPERIMENT) $(OPTIONS)

up: setup ## Run one service of compose.yaml: make up SERVICE=ddp-4gpu (says what to do where the GPUs are missing)
	@$(BIN)/python -m ddp_lab.cluster check $(SERVICE)
	@EXPERIMENT=$(EXPERIMENT) DDP_OPTIONS='$(OPTIONS)' docker compose up --build --exit-code-from $(SERVICE) $(SERVICE)

image: setup ## Build the image with torch for CUDA (GPU services, clusters), samebits
	docker compose build ddp-4gpu
	@$(call tag_image,samebits)

image-cpu: setup ## Build the image with torch for the CPU (all other services), samebits-cpu
	docker compose build ddp-cpu
	@$(call tag_image,samebits-cpu)

image-test: setup
	docker compose build test

test: setup ## Quick tests: no Docker, no network, a few minutes
	$(NO_GPU) $(BIN)/python -m pytest @tests/quick.args

test-full: setup ## The quick tests and those marked full, which take seconds
	$(NO_GPU) $(BIN)/python -m pytest @tests/full.args

test-rotation: setup ## Slow tests, longest unrun first: SECONDS=240, SLICE=3/7, ONLY="docker"; fails where one has not passed for two weeks
	$(NO_GPU) $(BIN)/python -m pytest -p tests.support.rotation -m "slow and not gpu and not gpu2$(if $(ONLY), and ($(ONLY)))" \
	  $(if $(SECONDS),--rotation-seconds $(SECONDS)) $(if $(SLICE),--rotation-slice $(SLICE))

test-oldest: setup ## The full tests on the oldest torch that pyproject.toml admits
	@$(BIN)/python tools/other_environment.py .venv-oldest --torch oldest
	$(NO_GPU) .venv-oldest/bin/python -m pytest @tests/full.args

test-newest: setup ## The full tests on the newest torch that pip finds, or on RELEASE=2.14.1
	@$(BIN)/python tools/other_environment.py .venv-newest --torch $(or $(RELEASE),newest)
	$(NO_GPU) .venv-newest/bin/python -m pytest @tests/full.args

test-pythons: setup ## The full tests on the other Pythons, 3.11 to 3.14, that are installed here; says which are not
	@for version in 3.11 3.12 3.13 3.14; do python=python$$version; \
	  if $(BIN)/$$python -c '' 2>/dev/null; then continue; fi; \
	  if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "test-pythons: skipped Python $$version, which is not installed here"; continue; fi; \
	  $(BIN)/python tools/other_environment.py .venv-$$version --python $$python && \
	  $(NO_GPU) .venv-$$version/bin/python -m pytest @tests/full.args || exit 1; done

test-extras: setup .venv/.extras-installed ## The tests that need other people's packages (peers, foreign, …), installed into .venv
	$(NO_GPU) $(BIN)/python -m pytest -n 2 --dist load -m "extras and not slow" --durations=10

.venv/.extras-installed: pyproject.toml packages/lab/pyproject.toml constraints.txt | setup
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[all,foreign,stores,notebooks,pages,schemas,packaging,workflows,site,uv]' -e packages/lab
	touch $@

test-streams: setup .venv-streams/.installed ## The tests that need MosaicML's streaming or LitData, which want older packages than the rest
	$(NO_GPU) .venv-streams/bin/python -m pytest -m extras tests/house/test_use_streaming_libraries.py

# Of the two files the first decides about a package.
.venv-streams/.installed: pyproject.toml packages/lab/pyproject.toml constraints.txt constraints-streams.txt | setup
	rm -rf .venv-streams && $(BIN)/python -m venv .venv-streams
	awk -F'==' '!seen[$$1]++' constraints-streams.txt constraints.txt >.venv-streams/constraints.txt
	.venv-streams/bin/python -m pip install -qq -c .venv-streams/constraints.txt pip hatchling
	.venv-streams/bin/python -m pip install -qq -c .venv-streams/constraints.txt --no-build-isolation -e '.[lab,test]' -e packages/lab \
	  mosaicml-streaming litdata
	touch $@

test-foreign: setup ## Other people's models and optimizers on every layout, hours; ONLY="timm torchvision.res" WORKERS=2 AGAIN=1
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[foreign]'
	$(NO_GPU) $(BIN)/python -m tests.foreign --workers $(WORKERS) $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again)

soak: setup ## Run the distributed and fault tests ROUNDS=20 times, each time beside a busy loop for each core
	@loops=; trap 'kill $$loops' EXIT; trap 'exit 130' INT TERM; \
	for core in $$(seq $$(nproc)); do while :; do :; done & loops="$$loops $$!"; done; \
	for round in $$(seq $(ROUNDS)); do echo "round $$round"; \
	  $(NO_GPU) $(BIN)/python -m pytest @tests/full.args tests/distributed tests/faults tests/core/launch || failed=1; \
	done; exit $${failed:-0}

test-docker: setup image image-cpu image-test ## Build the images, and run services and a cluster in containers
	$(BIN)/python -m pytest -m "docker and not slow" --durations=10 tests/docker

test-cluster: setup ## A real SLURM, a real Docker Swarm, power cuts on real file systems (root; installs Debian's packages)
	DDP_INSTALL=1 $(BIN)/python -m pytest -m "cluster and not slow" --durations=10 tests/cluster

test-gpu: setup ## The tests that need a GPU; without one, says what it skips. Records what ran in benchmarks/results
	DDP_GPU_LINES=benchmarks/results/gpu_check.jsonl $(BIN)/python -m pytest -m "gpu or gpu2" tests/gpu
	@$(BIN)/python -m benchmarks.gpu_runs

gpu-check: ## What holds on this GPU, most telling first, without setup or network: PYTHON=python3 MINUTES=9 OUT=folder SLICE=2/6 WHEELS=folder
	@$(or $(PYTHON),python3) -m benchmarks.gpu_check --minutes $(or $(MINUTES),9) $(if $(OUT),--out $(OUT)) \
	  $(if $(SLICE),--slice $(SLICE)) $(if $(ONLY),--only $(ONLY)) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(AGAIN),--again)

test-all: setup ## Every test that this machine can run; says what it skips and why
	@if docker info >/dev/null 2>&1; then $(MAKE) --no-print-directory image image-cpu image-test; fi
	$(NO_GPU) $(BIN)/python -m pytest -m "not gpu and not gpu2"
	$(MAKE) --no-print-directory test-pythons
	$(MAKE) --no-print-directory test-gpu

lint: setup ## ruff, shellcheck, hadolint and mypy, this also over every example of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck .ci/run tools/*.sh launch/slurm/*.sh launch/slurm/*.sbatch tests/cluster/*-up
	$(BIN)/hadolint Dockerfile
# Each of the two computes on one core.
	$(BIN)/mypy & mypy=$$!; $(BIN)/python -m tools.typed_examples; examples=$$?; wait $$mypy && exit $$examples

compare: setup ## One table of all runs in outputs/
	@$(BIN)/ddp compare

verify-layouts: setup ## Train one experiment on every layout that runs here, and set the digests side by side
	@$(BIN)/ddp verify-layouts $(EXPERIMENT)

chaos: setup ## Break a training cluster on purpose; the proof is the digest: DRILL=standard SEED=
	@$(BIN)/ddp chaos --drill $(DRILL) $(if $(SEED),--seed $(SEED)) --backend $(BACKEND)

claims: setup ## Measure what the articles claim, about fifteen minutes, and judge each sentence
	@$(BIN)/ddp claims

report: setup ## All runs, claims and drills on one page: outputs/report/index.html
	@$(BIN)/ddp report

site: setup $(if $(RUNS),,build/site/runs/.trained) ## The documentation as a site that needs no network: build/site/html/index.html; RUNS=outputs reports your runs
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[site]'
	$(if $(RUNS),,cp -r benchmarks/results/claims build/site/runs)
	$(BIN)/python -m tools.documentation_site --runs $(or $(RUNS),build/site/runs)

# Trained anew when the code has changed.
build/site/runs/.trained: $(shell find ddp_core experiments -name '*.py') | setup
	rm -rf $(@D) && mkdir -p $(@D)
	for experiment in linear_regression digits; do for ranks in 1 2; do \
	  $(BIN)/ddp train $$experiment --layout $$(test $$ranks = 1 && echo single || echo ddp --nproc-per-node $$ranks) \
	  --device cpu --output $(@D) || exit $$?; done; done
	touch $@

portable-digests: setup ## Make ddp_lab/probe/portable-digests-2.json anew; CONFIRM=1 asks emulated CPUs, too (Debian: qemu-user)
	$(NO_GPU) $(BIN)/python -m tools.portable_digests $(if $(CONFIRM),--confirm)

portable-runs: setup ## Train cut experiments under portable numerics and record their weights: ON="here Haswell Skylake-Client-v4 EPYC-Rome-v2" WORKERS=2 (Debian: qemu-user)
	@$(NO_GPU) $(BIN)/python -m tools.portable_runs $(if $(ON),--on $(ON)) --workers $(WORKERS); code=$$?; \
	$(BIN)/python -m tools.machines_seen && exit $$code

advisories: setup ## Known vulnerabilities of the pinned packages, by the package index (needs it); ends with 1 where there is one
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[audit]'
	$(BIN)/pip-audit --strict --progress-spinner off --no-deps --disable-pip --requirement constraints.txt

uv-lock: setup ## Write uv.lock and constraints.txt anew (needs the package index): PINS="-P click==8.5.1" or PINS=--upgrade moves versions
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[uv]'
	$(BIN)/uv lock $(PINS)
	versions=$$($(BIN)/uv export --frozen --quiet --all-extras --no-emit-workspace --no-hashes --no-annotate --no-header) && \
	{ echo "# Made by \`make uv-lock\` from constraints-torch.txt and uv.lock."; cat constraints-torch.txt; \
	  echo "# From uv.lock:"; echo "$$versions" | sed 's/ *;.*//'; } >constraints.txt

dist: setup ## Both wheels and the sdist, as an index takes them, the same bytes each time: dist/; REPOSITORY_URL= CONTACT_EMAIL=
	rm -rf dist
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[packaging]'
	$(BIN)/python -m hatchling build --directory dist
	cd packages/lab && $(abspath $(BIN))/python -m hatchling build --target wheel --directory ../../dist
	$(BIN)/python -m twine check --strict dist/*

sbom: ## What is in the image samebits, Python and Debian packages, as CycloneDX JSON: outputs/sbom.json
sbom-cpu: ## The same of samebits-cpu: outputs/sbom-cpu.json
sbom sbom-cpu: setup
	@$(BIN)/python tools/sbom.py $@

clean: ## Remove .venv, caches and this project's containers; runs in outputs/ and data/ stay
	@if docker info >/dev/null 2>&1; then docker compose --profile '*' down --remove-orphans; fi
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
