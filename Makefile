# `make help` lists the targets. Requirements: Python 3.10 or later, Java 17 or later, and Maven.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
SOURCES = delaylevel functions spark_sync cli tests tools benchmarks docs
PYTEST_ARGS ?=
# Tests of timing wait most of their time: three processes keep two processors busy.
WORKERS ?= 3
# tests/support/parallel.py distributes the tests; each process starts its own brokers.
PARALLEL = -n $(WORKERS)

# PySpark's workers must use the Python in which the package is installed.
export PYSPARK_PYTHON = $(abspath $(BIN))/python
export PYSPARK_DRIVER_PYTHON = $(PYSPARK_PYTHON)
# Many images set it. Without bytecode, each process that a test starts compiles the package (0.8 s).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo quick quick-tests test night lint format typecheck wheel wheel-check release walk java pytest reference broker broker-stop fetch bench torture versions pythons constraints mutants house compare install clean distclean

help: ## Show this list
	@echo "Usage: make TARGET"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON=$(PYTHON) (creates the virtual environment), VENV=$(VENV), PYTEST_ARGS (for pytest),"
	@echo "WORKERS=$(WORKERS) (processes that run tests; 0 runs them in pytest itself)"

demo: $(STAMP) ## Send delayed messages through a real broker and watch them arrive
	$(BIN)/delaylevel demo

# The tests wait a good part of their time; the other checks run beside them.
quick: $(STAMP) ## Run the checks and tests that need no broker
	@$(MAKE) --no-print-directory --keep-going --jobs=2 quick-tests lint typecheck

quick-tests: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not broker" tests/unit tests/contract tests/docs $(PYTEST_ARGS)

test: $(STAMP) ## Run all checks of CI
	@$(MAKE) --no-print-directory --keep-going --jobs=2 pytest lint typecheck wheel-check java

lint: $(STAMP) ## Check style and formatting (ruff), and the list of mutants
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python tools/mutants.py --list > /dev/null

format: $(STAMP) ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## Check the types (mypy, strict)
	$(BIN)/python tools/check_types.py

wheel: $(STAMP) ## Build the wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

wheel-check: $(STAMP) ## Build sdist and wheel, check them, and install them in a clean environment
	$(BIN)/python tools/check_wheel.py

release: $(STAMP) ## Build and check sdist and wheel for others, in dist/; refused while setup.cfg has placeholders
	$(BIN)/python tools/check_wheel.py --release

# A short run never makes up for the time that the JVM's second compiler takes.
java: export MAVEN_OPTS := -XX:TieredStopAtLevel=1 $(MAVEN_OPTS)
java: ## Test the Java producer with Maven; only the first run downloads something
	mvn --batch-mode --quiet --strict-checksums --file clients/java/pom.xml test

pytest: fetch ## Run the tests; PYTEST_ARGS="-k name" selects some
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# These tests measure times, so they run in one process. The searches have new seeds each time.
night: FIRST := $(or $(SEED),$(shell date +%s))
night: test ## Run everything, also what takes minutes; SEED=… repeats the searches of a night
	$(BIN)/python -m pytest --night $(PYTEST_ARGS)
	DELAYLEVEL_TEST_SEARCH=5 DELAYLEVEL_TEST_SEED=$(FIRST) $(BIN)/python -m pytest $(PARALLEL) \
		--hypothesis-seed=$(FIRST) tests/unit -k "model or live_view or pausing" $(PYTEST_ARGS)

torture: fetch ## Break everything at random for MINUTES=30 (SEED=… repeats a run), and audit each message
	TORTURE_MINUTES=$(or $(MINUTES),30) TORTURE_SEED=$(or $(SEED),0) \
		$(BIN)/python -m pytest -s tests/torture/night $(PYTEST_ARGS)

walk: fetch ## Type README and Getting started as a new user, with `run` and with Spark, and time it
	$(BIN)/python -m pytest -s tests/docs/night/test_walk.py

reference: $(STAMP) ## Write the help of all commands to build/commands.md
	$(BIN)/python tools/make_reference.py

broker: fetch ## Start a private broker (stop it with `make broker-stop`)
	$(BIN)/delaylevel broker start

broker-stop: $(STAMP) ## Stop the private broker; its data stays
	$(BIN)/delaylevel broker stop

fetch: $(STAMP) ## Download the Pulsar server with Maven, once
	@$(BIN)/delaylevel broker fetch

bench: fetch ## Install the peers of the benchmarks, and run these
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@set -e; found=; for file in benchmarks/bench_*.py; do \
		test -f "$$file" || continue; found=yes; \
		echo "$$file"; $(BIN)/python "$$file"; \
	done; test -n "$$found" || echo "There are no benchmarks yet."

# Flows on a real broker, a mover that dies, the dispatcher, cancellations, listeners, the Function, the
# Spark job, and tests that failed on one of the versions before.
VERSION_TESTS = tests/contract/test_flows.py tests/unit/cluster/test_client_parts.py tests/unit/topics/test_scan.py \
	tests/unit/spark_sync/test_job.py tests/unit/model/test_times.py \
	tests/integration/test_producer.py \
	tests/integration/test_dispatcher.py::test_every_field_of_a_message_arrives \
	tests/integration/night/test_listeners.py::test_partitions_and_their_retries \
	tests/integration/functions/test_function_moves.py::test_every_message_arrives_as_it_was_sent \
	tests/integration/test_spark.py

versions: $(STAMP) ## Try another version: PULSAR=3.3.6, or WITH="pyspark==4.2.0" VENV=build/other PYTHON=python3.12
	$(if $(WITH),$(BIN)/python -m pip install --quiet $(WITH))
	$(if $(PULSAR),DELAYLEVEL_TEST_BROKER_VERSION=$(PULSAR)) $(BIN)/python -m pytest $(VERSION_TESTS) $(PYTEST_ARGS)

# About an hour. MUTANTS="--list" lists them, MUTANTS="order cancellation --tier own" selects some.
mutants: $(STAMP) ## Break important lines, one at a time, and report which tests notice
	$(BIN)/python tools/mutants.py $(MUTANTS)

# Each has an environment of its own, in build/.
pythons: ## Run the selection of `versions` with every Python from 3.10 on that this machine has
	@set -e; for minor in 10 11 12 13 14; do python=python3.$$minor; \
		$$python -c '' 2>/dev/null || { echo "$$python: not on this machine"; continue; }; \
		$(MAKE) --no-print-directory versions VENV=build/$$python PYTHON=$$python; done

# After a green run: what everybody gets from the Makefile. Python 3.10 gets what pip finds for it.
constraints: $(STAMP) ## Write the versions that are installed to constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/$$/; python_version >= "3.11"/' > constraints.txt

house: $(STAMP) ## Measure the code: modules, classes, floors of imports, the path of one message
	@$(BIN)/python tools/house.py

# About half an hour. COMPARE="--help" lists the options.
compare: fetch ## Compare with native delays, NATS and RocketMQ; COMPARE="--systems nats" selects some
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	PYTHONPATH=benchmarks $(BIN)/python -m compare $(COMPARE)

install: $(STAMP) ## Create the virtual environment

# Reinstall only when the package's dependencies or configuration have changed.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or later is required, but $(PYTHON) is" \
			"`$(PYTHON) --version 2>&1`. Use: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the package in $(VENV), with what its development needs: PySpark alone is 400 MB."
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt -e '.[dev]'
	@touch $@

clean: ## Delete build output, but not the virtual environment
	rm -rf clients/java/target build dist delaylevel.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse artifacts
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Delete the virtual environment as well
	rm -rf $(VENV)
