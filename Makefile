# DDPJob: `make help` lists what there is to do. Two commands set everything up on a fresh machine: `make demo`, `make test`.
# Settings: PYTHON (3.11 or newer), VENV, TORCH_INDEX (an index with the torch build that you want; default: pip's own choice),
# WORKERS (how many processes `make test` runs tests in; 4).
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 4
# Each test starts processes, and each of those would compile this project's modules anew.
unexport PYTHONDONTWRITEBYTECODE
export DDPJOB_CACHE_DIR ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/ddpjob

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

##@ Try it
demo: $(VENV)/.trainer  ## train the sample job on this machine, kill a rank halfway, see it finish
	@rm -rf build/demo
	$(BIN)/ddpjob run manifests/samples/ddpjob.yaml --shared build/demo --chaos kill-rank@50%

screenshots: $(VENV)/.dev tools  ## docs/pictures/*.png, from real runs in a real browser
	$(BIN)/python -m tests.local.screenshots

demo-cluster: $(VENV)/.dev  ## the same on a real Kubernetes cluster, installed by Helm, watched by Prometheus
	$(BIN)/python -m tests.cluster.demo

##@ Check it
test: $(VENV)/.dev tools  ## everything: style, types, layers, and every test, in four workers; prints how long they and the longest tests took
	@$(MAKE) --no-print-directory -j --output-sync=target lint
	$(PYTEST) -q -n $(WORKERS) --max-worker-restart=0 --durations=25 tests

check: $(VENV)/.dev  ## lint, and every test that starts no process, properties with a quarter of their examples: about a minute on two cores
	@$(MAKE) --no-print-directory -j --output-sync=target lint check-live check-trainer check-rank check-unit check-core

check-oldest: build/oldest/.installed  ## the tests of `check` with the oldest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -q -m "not processes" tests/unit tests/trainer

busy-test: $(VENV)/.dev tools  ## `make test` five times beside four busy processes; prints time and counts of each run
	$(BIN)/python -m tests.support.busy

# Workers of pytest-xdist would each import torch and collect all tests, which takes a third of the time. The first two
# parts do not import it.
IN_PROCESS := $(PYTEST) -q -m "not processes" --hypothesis-profile=quick
check-core: $(VENV)/.dev
	$(IN_PROCESS) $(addprefix tests/unit/,core simulation cli page)
check-unit: $(VENV)/.dev
	$(IN_PROCESS) tests/unit $(addprefix --ignore=tests/unit/,core simulation cli page contracts)
check-rank: $(VENV)/.dev
	$(IN_PROCESS) $(addprefix tests/trainer/,rank integrations client train)
check-trainer: $(VENV)/.dev
	$(IN_PROCESS) tests/trainer $(addprefix --ignore=tests/trainer/,rank integrations client train live)
check-live: $(VENV)/.dev  # waits most of the time, which leaves it some for the contracts
	$(IN_PROCESS) tests/trainer/live tests/unit/contracts

test-unit: $(VENV)/.dev tools  ## all of tests/unit, no process of the trainer: two minutes on one core
	$(PYTEST) -q tests/unit

test-trainer: $(VENV)/.dev tools  ## the trainer under real torchrun
	$(PYTEST) tests/trainer

test-local: $(VENV)/.dev tools  ## whole jobs on this machine
	$(PYTEST) tests/local

test-api: $(VENV)/.dev tools  ## the operator against a real API server
	$(PYTEST) tests/api_server

test-cluster: $(VENV)/.dev  ## real pods on real nodes
	$(PYTEST) tests/cluster

test-gpu: $(VENV)/.dev  ## what needs CUDA: one GPU is enough, with an environment whose torch has CUDA
	$(PYTEST) tests/gpu

test-packaging: $(VENV)/.dev tools  ## chart, manifests, images, installed environments
	$(PYTEST) tests/packaging

lint: lint-style lint-types lint-layers lint-files  ## ruff, mypy, import layers, Dockerfiles, generated files

lint-style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(VENV)/.dev
	$(BIN)/mypy

lint-layers: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

lint-files: $(VENV)/.dev
	$(BIN)/hadolint Dockerfile trainer_image/Dockerfile
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m tests.simulation --check

scan: $(VENV)/.dev build/scan/.installed  ## Dockerfiles and the rendered chart against checkov's rules, offline
	release/scan.sh $(BIN) build/scan/bin

mutate: $(VENV)/.dev  ## mutation testing of core: MODULES="failure.budget stages.running", or all of it, which takes hours
	$(BIN)/python -m tests.mutation $(MODULES)

prove: $(VENV)/.dev  ## what docs/correctness.md says, from real runs: strategies agree, killed runs resume bit for bit
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.prove

simulate: $(VENV)/.dev  ## goodput of each restart scope at published failure rates: docs/goodput.json, docs/goodput.md and its pictures; SEEDS=3
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),3)

count-scripts: $(VENV)/.dev  ## how often scripts on libraries end as they should, and hangs are blamed rightly: RUNS=30 BUSY=4
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.count_scripts --runs $(or $(RUNS),3) --busy $(or $(BUSY),0)

bench-trainer: $(VENV)/.dev  ## step, snapshot, resume, recovery and stalls of the trainer, beside what each must cost
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks

bench: $(VENV)/.dev  ## apply to first step, and an edited line to its output, beside doing it by hand; seconds to a cause, to a takeover
	$(BIN)/python -m tests.cluster.bench
	$(BIN)/python -m tests.cluster.bench_submit
	$(BIN)/python -m tests.cluster.bench_causes
	$(BIN)/python -m tests.api_server.bench_takeover

bench-page: $(VENV)/.dev  ## the list of 1,000 jobs as a web page; fails above 200 ms of processor time
	$(BIN)/python -m tests.benchmarks.bench_page

bench-live: $(VENV)/.dev  ## seconds from a fault to the next step of the other ranks: Gang, InPlace and Live, on two real nodes
	$(BIN)/python -m tests.cluster.bench_live

live-faults: $(VENV)/.dev  ## live recovery under 200 faults at random, on this machine: SEED=1 FAULTS=200 OWN_LOOP=1
	$(BIN)/python -m tests.trainer.live.random_faults --seed $(or $(SEED),1) --faults $(or $(FAULTS),200) \
	  $(if $(OWN_LOOP),--own-loop)

tour: $(VENV)/.dev  ## docs/tour.md: what the verbs of ddpjob print on the test cluster
	$(BIN)/python -m tests.cluster.transcripts

bench-operator: $(VENV)/.dev  ## what the operator costs on a real API server, up to JOBS=1000 jobs of NODES=8 pods
	$(BIN)/python -m tests.api_server.bench_operator --jobs $(or $(JOBS),1000) --nodes $(or $(NODES),8)

chaos: $(VENV)/.dev  ## faults at random on two real nodes: SEED=1 MINUTES=10; figures go to docs/reliability.md
	$(BIN)/python -m tests.cluster.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10) --record
	$(BIN)/python docs/reliability.py

upgrade: $(VENV)/.dev  ## jobs of an earlier version under this one, on two real nodes: FROM=v0.1.0, or any commit
	$(BIN)/python -m tests.cluster.upgrade $(FROM)

soak: $(VENV)/.dev  ## jobs that come and go, and nothing of the operator grows: JOBS=1000 MINUTES=30
	$(BIN)/python -m tests.api_server.soak --jobs $(or $(JOBS),1000) --minutes $(or $(MINUTES),30)

troubleshooting: $(VENV)/.dev  ## docs/troubleshooting.md, from wrong scripts that are run: minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.wrong_scripts

##@ Change it
format: $(VENV)/.dev  ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.dev  ## write the CRD, five pages of docs/, tables and pictures of docs/goodput.md, the chart's README, roles, policies and dashboards
	$(BIN)/python docs/generate.py
	$(BIN)/python -m tests.simulation --draw

images:  ## build the operator's and the trainer's image with docker, podman or buildah
	tests/cluster/images.sh

run-operator: $(VENV)/.dev  ## the operator from this source tree, with the current kubeconfig; see CONTRIBUTING.md
	DDPJOB_OPERATOR_LOG_FORMAT=plain $(BIN)/python -m ddpjob_operator.main

cluster-up: $(VENV)/.dev  ## start the test cluster and leave it running
	tests/cluster/cluster.sh up

cluster-load:  ## build both images and put them on its nodes, where a cluster elsewhere has a registry
	images=$$(tests/cluster/images.sh) && echo "$$images" | while read -r image archive; do \
	  tests/cluster/cluster.sh load "$$archive" "$$image" || exit; done

cluster-down:  ## stop it and remove what it made
	tests/cluster/cluster.sh down

clean:  ## remove what was built here (the cache stays)
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

##@ Release it
release-check: $(VENV)/.dev  ## that all files name the version of TAG=vX.Y.Z
	$(BIN)/python release/release.py check $(TAG)

release-notes: $(VENV)/.dev  ## dist/NOTES.md, from the changelog
	$(BIN)/python release/release.py notes

wheel: $(VENV)/.dev  ## dist/ddpjob-VERSION-py3-none-any.whl
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .

chart-package: $(VENV)/.dev  ## dist/ddpjob-operator-VERSION.tgz; REGISTRY=ghcr.io/ddpjob: where its images come from
	$(BIN)/python release/release.py chart $(REGISTRY)

krew-package: wheel  ## dist/kubectl-ddpjob-VERSION.tar.gz and its krew manifest, dist/ddpjob.yaml
	$(BIN)/python release/release.py krew

sbom: $(VENV)/.dev  ## dist/IMAGE-TAG.spdx.json for both images, with syft
	release/sbom.sh $(BIN)

# ---- environments -------------------------------------------------------------------------------------------------------
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "DDPJob needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory python-venv
	$(PYTHON) -m venv $(VENV)

# Debian keeps venv in a package of its own
python-venv:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; \
	else echo "Python's venv module is missing; install it, on Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; fi

# what some tests run and a fresh Debian lacks; elsewhere those tests skip and say so, or fail if DDPJOB_REQUIRE names them
tools:
	@has() { for name; do command -v "$$name" >/dev/null && return; done; return 1; }; \
	missing=$$( \
	  has promtool || echo prometheus; \
	  has chromium chromium-browser google-chrome || echo chromium; \
	  for name in shellcheck zsh fish; do has $$name || echo $$name; done \
	); \
	[ -z "$$missing" ] || tests/cluster/cluster.sh need $$missing || \
	  echo "missing here, and not to be installed:" $$missing

# torch first and on its own: a build that is there already satisfies every range
$(VENV)/.torch: requirements/torch.txt | $(BIN)/python
	@echo "installing PyTorch into $(VENV) ..."
	$(PIP) $(INDEX) -r requirements/torch.txt
	@touch $@

$(VENV)/.trainer: $(VENV)/.torch requirements/dev.txt pyproject.toml
	@echo "installing ddpjob[cli,trainer] into $(VENV) ..."
	$(PIP) -c requirements/torch.txt -e '.[cli,trainer]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch requirements/dev.txt requirements/libraries.txt pyproject.toml
	@echo "installing what the tests need into $(VENV) ..."
	$(PIP) --require-hashes -r requirements/dev.txt
	$(PIP) --require-hashes --no-deps -r requirements/libraries.txt
	$(PIP) --no-deps -e .
	@touch $@ $(VENV)/.trainer

# an environment of its own: checkov needs old versions of much
build/scan/.installed: requirements/scan.txt | $(BIN)/python
	@echo "installing checkov into build/scan ..."
	$(BIN)/python -m venv build/scan
	build/scan/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements/scan.txt
	@touch $@

build/oldest/.installed: pyproject.toml | $(VENV)/.dev
	@echo "installing the oldest dependencies into build/oldest ..."
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/oldest
	$(BIN)/uv pip install --quiet --python build/oldest/bin/python --resolution lowest-direct $(INDEX) \
		--index-strategy unsafe-best-match --group libraries -e '.[dev]'
	@touch $@

help:
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*##/ {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: test-gpu simulate screenshots tour scan bench-page bench-live live-faults bench-operator chaos soak upgrade count-scripts troubleshooting mutate busy-test check-core check-unit check-rank check-live check-trainer lint-style lint-types lint-layers lint-files demo demo-cluster test test-unit test-trainer test-local test-api test-cluster test-packaging check lint prove bench-trainer bench format generate \
	release-check release-notes wheel chart-package krew-package sbom images run-operator cluster-up cluster-load cluster-down clean python-venv tools help
