# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first and need only make and Python 3.11 or later.
PYTHON ?= python3
# The address of the demo: make demo PORT=9000 IP=0.0.0.0
PORT ?= 8000
IP ?= 127.0.0.1
# What to test: make test TESTS=tests/arbiter
TESTS ?=
# What to mutate: make mutation PACKAGE=idle, or PACKAGE="quota arbiter.schedule" SAMPLE=60 SEED=2
PACKAGE ?= placement idle arbiter
# How many test files run at a time: make test WORKERS=2. Tests wait for processes 60 % of their time. With eight at a time on two
# cores, compilers and hubs of the heavy tests miss their time-outs. Tests of one file share what they started.
WORKERS ?= 5
# Hundreds of processes import the packages: what Python has compiled is kept, even where the environment forbids it.
PYTEST = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow coverage mutation check docs format helm-values lock venv clean
.NOTPARALLEL:

demo: ## a hub with shared GPUs on this machine, until Ctrl-C
	@$(PYTHON) .ci/make_venv.py demo
	@exec .venv/bin/gpushare demo --ip $(IP) --port $(PORT)

test: ## everything but what `test-slow` tests, on one machine and on a stand-in cluster; with TESTS, all of that
	@$(PYTHON) .ci/make_venv.py dev
	@exec $(PYTEST) $(if $(TESTS),$(TESTS),-m "not slow")

coverage: ## what part of the lines and branches of each package the tests of `make test` run; with TESTS, those
	@$(PYTHON) .ci/make_venv.py dev
	@.venv/bin/python .ci/coverage_table.py $(PYTEST) $(if $(TESTS),$(TESTS),-m "not slow")

test-slow: ## crowds, a kill at each step, and builds: minutes of work that a small change seldom breaks
	@$(PYTHON) .ci/make_venv.py dev
	@exec $(PYTEST) -m slow

mutation: ## small changes to the pure packages, each of which a test has to notice; takes some minutes for each package
	@$(PYTHON) .ci/make_venv.py dev
	@exec .venv/bin/python .ci/mutation.py $(PACKAGE) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

check: ## linters, types, the architecture, the C code's format and its layers
	@$(PYTHON) .ci/make_venv.py dev
	@exec .ci/check

docs: ## the documentation site, into build/docs; warnings are errors
	@$(PYTHON) .ci/make_venv.py dev
	@.venv/bin/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "build/docs/index.html"

format: ## write the Python and the C code in the house's format, and draw the diagrams anew
	@$(PYTHON) .ci/make_venv.py dev
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .
	@.venv/bin/python docs/diagrams/draw.py
	@find gpushare_spawner/native packages -name '*.[ch]' -exec .venv/bin/clang-format -i {} +

helm-values: ## copy the config files and the schema of templates into helm-values/
	@$(PYTHON) .ci/make_venv.py dev
	@.venv/bin/python .ci/helm_values.py

lock: ## the exact versions that demo, tests and releases install, with hashes, into .ci/locks
	@$(PYTHON) .ci/make_venv.py dev
	@.venv/bin/python -m pip install --quiet uv
	@.venv/bin/python .ci/locks.py

venv: ## the environment alone
	@$(PYTHON) .ci/make_venv.py dev

clean: ## remove what was built, the environment and the demo's state
	rm -rf .venv .demo gpushare_spawner/native/lib gpushare_spawner/notebook/labextension $(addprefix gpushare_spawner/notebook/lab/,.yarn lib node_modules) packages/gpushare-simgpu/gpushare_simgpu/lib build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
