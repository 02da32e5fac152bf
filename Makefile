# Every target works on a fresh clone; those that need the CPU stack install it first (.venv).
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(if $(shell $(p) -c 'import sys; print(sys.version_info[:2] in ((3, 11), (3, 12)) or "")' 2>/dev/null),$(p))))
CHROMIUM := $(shell for name in chromium chromium-browser google-chrome; do command -v $$name; done)
PROMETHEUS := $(shell command -v prometheus)
INSTALL := $(PYTHON) scripts/setup.py

PYTEST := $(BIN)/python -m pytest
# Where it is set, every process that tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Collecting all others takes a third of a minute.
ENGINES := $(sort $(shell grep -rlE 'mark\.engine' tests --include='test_*.py'))

PARALLEL := -n $(shell echo $$(($$(nproc) + 1))) --maxprocesses 5
ALL := --thorough --hypothesis-profile=random
BUT_BROWSER := $(if $(CHROMIUM),, and not browser)
BUT_PROMETHEUS := $(if $(PROMETHEUS),, and not prometheus)
NO_CHROMIUM := $(if $(CHROMIUM),:,echo "make: no Chromium here (apt-get install chromium): the pages are not opened" >&2)
NO_PROMETHEUS := $(if $(PROMETHEUS),:,echo "make: no Prometheus here (apt-get install prometheus): the dashboard's queries are not asked" >&2)
ROOT_USER := $(filter 0,$(shell id -u))

SAMPLE ?= 40
SEED ?= 1
LEAST ?= 0
MUTATE ?= minicluster sizing serving loadtest
TESTS ?= tests

.PHONY: setup demo demo-70b test test-fast test-all test-faults test-fuzz test-netns mutants check fix bench docs pictures clean platform

setup: $(READY) ## .venv with the three commands and the CPU stack
	@$(BIN)/python scripts/compile_simulation.py

platform:
	@[ "$$(uname -s) $$(uname -m)" = "Linux x86_64" ] || { echo "make: serving runs on Linux x86-64, this is $$(uname -s) $$(uname -m); \`pip install -e .\` gives the sizing command everywhere" >&2; exit 2; }
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }

$(READY): requirements/torch-cpu.txt requirements/cpu.txt requirements/ui.txt requirements/dev.txt pyproject.toml scripts/setup.py | platform
	@$(INSTALL)
	@touch $@

demo: setup ## measure this machine, plan, serve, load, judge: out/demo, 4 minutes (ARGS=-v: all that is printed)
	@$(BIN)/python scripts/demo.py $(ARGS)

demo-70b: setup ## a plan for 56 GPUs on this machine: simulated engines under the real cluster, 3 minutes
	@$(BIN)/python scripts/demo_70b.py

test: setup ## everything but campaigns, real Ray and vLLM included: 12 to 25 minutes on 2 cores
	@$(NO_CHROMIUM)
	@$(NO_PROMETHEUS)
	@code=0; \
	echo "== without engines"; $(PYTEST) $(PARALLEL) -m "not engine$(BUT_BROWSER)$(BUT_PROMETHEUS)" || code=$$?; \
	echo "== on real engines"; $(PYTEST) -m engine $(ENGINES) || code=$$?; \
	exit $$code

test-fast: setup ## what needs neither a Ray cluster nor a browser: 4 to 9 minutes on 2 cores
	@$(PYTEST) $(PARALLEL) -m "not engine and not simulated and not browser"

test-all: setup ## make test, and what takes an hour and more
	@echo "make test-all: beside what make test runs: new random examples, backwards; campaigns (kills and freezes in rounds, 200 prompts compared, bf16, scaling, 10,000 broken bodies, schemathesis); hosts in network namespaces (root); scripts/demo.py"
	@$(NO_CHROMIUM)
	@$(NO_PROMETHEUS)
	@$(if $(ROOT_USER),,echo "make: not root: no network namespaces here, tests/serving/netns is left out" >&2)
	@$(INSTALL) requirements/fuzz.txt
	@code=0; \
	echo "== without engines"; $(PYTEST) $(PARALLEL) $(ALL) --backwards -m "not engine$(BUT_BROWSER)$(BUT_PROMETHEUS)" || code=$$?; \
	echo "== on real engines"; $(PYTEST) $(ALL) -s -m engine $(if $(ROOT_USER),,--ignore=tests/serving/netns) || code=$$?; \
	exit $$code

test-faults: setup ## of test-all: every failure, 20 rounds of kills on real engines and 20 of faults on simulated ones, 200 prompts compared
	@$(PYTEST) --thorough tests/serving/faults tests/serving/test_groups.py tests/serving/simulated/test_simulated_cluster.py

test-fuzz: setup ## of test-all: ten thousand broken bodies and schemathesis against real engines
	@$(INSTALL) requirements/fuzz.txt
	@$(PYTEST) --thorough -s tests/serving/test_fuzz.py

test-netns: setup ## of test-all: pools on hosts that are network namespaces (root)
	@$(PYTEST) --thorough -s tests/serving/netns

mutants: $(READY) ## does a test fail where the code is wrong? 40 changes, 15 minutes; SAMPLE= SEED= MUTATE= TESTS= LEAST=
	@$(BIN)/python scripts/mutants.py --sample $(SAMPLE) --seed $(SEED) --least $(LEAST) --paths $(MUTATE) --tests $(TESTS)

check: $(READY) ## style, types, imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fix: $(READY) ## what ruff can mend by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## speed and fidelity of the models; the other benchmarks load something, their headers say what
	@$(INSTALL) requirements/bench.txt
	@for name in fit_ops simulation_speed plan_speed; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

docs: $(READY) ## the generated pages, and the site of all pages with the Python reference: out/site
	@$(INSTALL) requirements/docs.txt
	@$(BIN)/python scripts/docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "out/site/index.html"

pictures: setup ## docs/images anew, those whose pages have changed (Chromium, 2 minutes)
	@$(BIN)/python scripts/pictures.py

clean: ## what make made, a running deployment included
	@[ ! -x $(BIN)/serving ] || $(BIN)/serving down 2>/dev/null || true
	@rm -rf $(VENV) out .minicluster .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
