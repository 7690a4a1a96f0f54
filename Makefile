# make demo   install into .venv, then generate text with and without DFlash
# make test   install into .venv, then lint, check types and run every test
.PHONY: demo test setup test-v1 test-v2 test-processes

demo: setup
	scripts/run.sh python examples/offline.py

# The two runners need a process each; the interpreter that V2 runs in keeps one core busy. Tests of
# servers and clusters, which start processes and wait for them, run behind it.
test: setup
	scripts/run.sh ruff check .
	scripts/run.sh ruff format --check .
	scripts/run.sh mypy
	$(MAKE) --jobs=2 --keep-going --output-sync=target test-v1 test-v2 test-processes

test-v1:
	scripts/run.sh pytest -m "not server and not cluster" $(PYTEST_ARGS)

test-processes: | test-v2
	scripts/run.sh pytest -m "server or cluster" $(PYTEST_ARGS)

test-v2:
	scripts/run.sh pytest --runner v2 $(PYTEST_ARGS)

setup:
	@bash scripts/setup.sh
