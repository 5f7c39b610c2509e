.PHONY: check lint types docs test slow matrix format

check: lint types docs test slow  ## what CI runs, in the current environment

lint:
	ruff check .
	ruff format --check .

types:
	mypy

docs:
	sphinx-build -q -W --keep-going -b html docs docs/_build/html

test:
	python -m pytest

slow:
	python -m pytest -m slow

matrix:  ## the tests that depend on versions, on every torch and Python that is promised
	python tools/matrix.py

format:
	ruff check --fix .
	ruff format .
