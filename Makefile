# make demo   install into .venv, then generate text with and without DFlash
# make test   install into .venv, then lint, check types and run every test
.PHONY: demo test setup test-v1 test-v2

demo: setup
	scripts/run.sh python examples/offline.py

# The two runners need a process each; the interpreter that V2 runs in keeps one core busy.
test: setup
	scripts/run.sh ruff check .
	scripts/run.sh ruff format --check .
	scripts/run.sh mypy
	$(MAKE) --jobs=2 --output-sync=target test-v1 test-v2

test-v1:
	scripts/run.sh pytest $(PYTEST_ARGS)

test-v2:
	scripts/run.sh pytest --runner v2 $(PYTEST_ARGS)

setup:
	@bash scripts/setup.sh
