# make demo   install into .venv, then generate text with and without DFlash
# make test   install into .venv, then lint, check types and run every test
.PHONY: demo test setup

demo: setup
	scripts/run.sh python examples/offline.py

test: setup
	scripts/run.sh ruff check .
	scripts/run.sh ruff format --check .
	scripts/run.sh mypy
	scripts/run.sh pytest $(PYTEST_ARGS)
	scripts/run.sh pytest --runner v2 $(PYTEST_ARGS)

setup:
	@bash scripts/setup.sh
