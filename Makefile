# Every target sets up what it needs (scripts/bootstrap): Debian packages where they are missing, and .venv.
# PYTHON=/path/to/python picks the interpreter of .venv; ARGS='-k snapshot -x' goes to pytest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?=
ARGS ?=
COVERAGE ?=
# How many tests run at once; 0 runs them one by one in this process (for a debugger).
# More than CPUs: tests wait for daemons a third of their time, and rarely all at once.
WORKERS ?= $(shell echo $$(($$(nproc) * 3 / 2 + 1)))
BIN := .venv/bin
BOOTSTRAP := PYTHON='$(PYTHON)' scripts/bootstrap
PYTEST := $(if $(COVERAGE),$(BIN)/coverage run -m pytest,$(BIN)/pytest)

# Of `make bench-short`: seconds for the table and for snapshots, and pairs of builds.
TABLE_S ?= 480
REWIND_S ?= 120
PAIRS ?= 20
MATPLOTLIB := $(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/pip install --quiet -e '.[bench]'

.PHONY: help setup demo compiled wheel test test-all test-compiled test-integrations test-weakincentives coverage coverage-report lint format man bench bench-short clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with vfsd and the developers' tools
	@$(BOOTSTRAP) dev

demo: ## a tour: an agent's damage on a copy of this project, seen, rewound, partly applied
	@$(BOOTSTRAP) fuse
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

compiled: ## the hot path as extensions of the Python in .venv, in place; needs a C compiler, and a minute or two
	@$(BOOTSTRAP) dev
	$(BIN)/python scripts/compile.py

wheel: ## dist/vfsd-VERSION-*.whl with these extensions, for this version of Python and this architecture
	@$(MAKE) compiled
	@rm -rf build
	VFSD_COMPILED_WHEEL=1 $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

# Which tests: short, all, or rest (all but the short ones); tests/support/suites.py has the rules.
SUITE ?= short
test: ## the tests to run before lunch (five minutes on two idle CPUs); ARGS='...' goes to pytest
	@$(BOOTSTRAP) tests
	@$(if $(COVERAGE),$(BIN)/coverage erase)
	@$(BIN)/python -m compileall -q -j 0 protocol vfsd tests # else each worker does that
	@$(BIN)/python -m tests.support.compiling # the same, for what pytest makes of the tests
	$(PYTEST) -n $(WORKERS) --dist worksteal --suite $(SUITE) $(ARGS)

test-all: ## all tests but the long campaigns; ARGS=--runs-long for these too
	@$(MAKE) test SUITE=all

# Other backends, and the pyfuse3 engine, run little of what is compiled.
ON_COMPILED := VFSD_COMPILED=1 $(PYTEST) -n $(WORKERS) --dist worksteal
test-compiled: ## the tests of mounts, contracts and models, and the differential ones, on the compiled build
	@$(BOOTSTRAP) tests
	@$(MAKE) compiled
	@$(BIN)/python -c 'from protocol import compiled; assert compiled.build()[0] == "compiled", compiled.build()'
	$(ON_COMPILED) --suite short -k 'not host and not pyfuse3' tests/contract tests/model tests/mount tests/differential $(ARGS)
	$(ON_COMPILED) --suite rest -k native-overlay tests/mount/test_semantics_*.py $(ARGS)

# With packages of its own, which .venv does not need; CI does not run it.
INTEGRATIONS := .venv-integrations
test-integrations: ## vfsd with the real Claude Code and other agents, against a scripted model; needs npm
	@$(BOOTSTRAP) fuse tests
	@command -v npm >/dev/null || { echo "test-integrations: npm is missing: install Node.js 18 or newer" >&2; exit 1; }
	@[[ -x $(INTEGRATIONS)/bin/python ]] || $(BIN)/python -m venv $(INTEGRATIONS)
	@echo 'test-integrations: installing the packages of all extras into $(INTEGRATIONS), a few minutes the first time' >&2
	@$(INTEGRATIONS)/bin/pip install --quiet --editable '.[dev,claude-agent,fsspec,mcp,pydantic-ai,deepagents,openai-agents]' 'langchain-tests>=1.1' 'watchdog>=6' || \
	{ echo 'test-integrations: pip could not install the extras; is the package index reachable?' >&2; exit 1; }
	@echo 'test-integrations: installing Claude Code, Codex, Gemini CLI and OpenCode' >&2
	@npm install --silent --no-save --prefix $(INTEGRATIONS)/npm @anthropic-ai/claude-code@2 @openai/codex@0 @google/gemini-cli@0 opencode-ai@1 || \
	{ echo "test-integrations: npm could not install the agents; is npm's registry reachable?" >&2; exit 1; }
	@npm install --silent --no-save --prefix $(INTEGRATIONS)/watchers typescript@5 chokidar@4 || \
	{ echo "test-integrations: npm could not install TypeScript; is npm's registry reachable?" >&2; exit 1; }
	@scripts/sdist $(INTEGRATIONS)/bin/python openai-agents $(INTEGRATIONS)/openai-agents
	VFSD_INTEGRATIONS=1 VFSD_CLAUDE=$(CURDIR)/$(INTEGRATIONS)/npm/node_modules/.bin/claude \
	VFSD_AGENTS=$(CURDIR)/$(INTEGRATIONS)/npm/node_modules/.bin \
	VFSD_WATCHERS=$(CURDIR)/$(INTEGRATIONS)/watchers \
	VFSD_OPENAI_AGENTS_SOURCE=$(CURDIR)/$(INTEGRATIONS)/openai-agents \
	$(INTEGRATIONS)/bin/pytest -p no:asyncio tests/integrations --ignore tests/integrations/test_weakincentives.py $(ARGS)
	@$(if $(ARGS),,$(MAKE) test-weakincentives)

# weakincentives needs Python 3.12, which .venv need not have.
WINK := .venv-weakincentives
PYTHON312 ?= $(shell for each in python3.13 python3.12 python3 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin/python3; do \
if $$each -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then command -v $$each; break; fi; done)
test-weakincentives: ## vfsd with weakincentives, and its own tests; needs Python 3.12 (PYTHON312=/path/to/python)
ifeq ($(PYTHON312),)
	@echo "test-weakincentives: not run: there is no Python 3.12 or newer (PYTHON312=/path/to/python names one)"
else
	@$(BOOTSTRAP) fuse tests
	@[[ -x $(WINK)/bin/python ]] || $(PYTHON312) -m venv $(WINK)
	@$(WINK)/bin/pip install --quiet --editable '.[dev,weakincentives]' \
	'weakincentives[acp,claude-agent-sdk,redis,skills,wink]' pytest-rerunfailures
	@scripts/sdist $(WINK)/bin/python weakincentives $(WINK)/weakincentives
	VFSD_INTEGRATIONS=1 VFSD_WINK_SDIST=$(CURDIR)/$(WINK)/weakincentives \
	$(WINK)/bin/pytest -p no:asyncio tests/integrations/test_weakincentives.py $(ARGS)
endif

coverage: ## the tests of SUITE (short, all), and which lines and branches they reached, daemons included
	@status=0; $(MAKE) test COVERAGE=1 || status=$$?; $(MAKE) coverage-report; exit $$status

coverage-report: ## what the last measured run reached
	@$(BOOTSTRAP) dev
	@if compgen -G '.coverage.*' >/dev/null; then $(BIN)/coverage combine --quiet; fi
	@$(BIN)/coverage report --skip-covered

lint: ## ruff (rules and format) and strict types
	@$(BOOTSTRAP) dev
	@status=0; for check in 'ruff check .' 'ruff format --check .' mypy; do \
	echo "$$check"; $(BIN)/$$check || status=1; done; exit $$status

format: ## let ruff format the code and mend what it can
	@$(BOOTSTRAP) dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

man: ## docs/man, and the generated parts of docs/json.md and docs/backends.md
	@$(BOOTSTRAP) dev
	$(BIN)/python -m vfsd.cli.man_pages docs/man
	$(BIN)/python scripts/json_doc.py
	$(BIN)/python scripts/mount_doc.py

bench: ## the tables of workloads and file systems, and two pictures; ARGS=--quick for two rounds
	@$(BOOTSTRAP) fuse tests
	@$(MATPLOTLIB)
	$(BIN)/python -m bench.table --json docs/bench.json $(ARGS)
	$(BIN)/python -m bench.rewind --json docs/bench-rewind.json
	$(BIN)/python -m bench.latency_under_load --json docs/bench.json
	$(BIN)/python -m bench.neighbours --json docs/bench.json
	$(BIN)/python -m bench.report --pictures --targets
	$(BIN)/python -m bench.control --json docs/bench-control.json $(filter --quick,$(ARGS))
	$(BIN)/python -m bench.overlay
	$(BIN)/python -m bench.store
	$(BIN)/python -m bench.container --json docs/bench-container.json $(filter --quick,$(ARGS))

bench-short: ## the same tables and pictures for four file systems, in about 13 minutes of an idle machine
	@$(BOOTSTRAP) fuse tests
	@$(MATPLOTLIB)
	@trap 'exit 130' INT; status=0; for part in \
	'table --short --budget $(TABLE_S) --json docs/bench.json $(ARGS)' \
	'rewind --budget $(REWIND_S) --json docs/bench-rewind.json' \
	'latency_under_load --seconds 3 --json docs/bench.json' \
	'neighbours --pairs $(PAIRS) --json docs/bench.json' \
	'report --pictures --targets'; do \
	echo "bench.$$part"; $(BIN)/python -m bench.$$part || status=1; done; exit $$status

clean: ## remove what was built and measured; .venv too
	rm -rf .venv $(INTEGRATIONS) $(WINK) build dist *.egg-info htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -rf protocol/compiled/protocol protocol/compiled/vfsd protocol/compiled/*.so protocol/compiled/*.json
	find protocol vfsd tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
