.PHONY: check lint types docs test slow gpu-sim gpu matrix format

check: lint types docs test slow gpu-sim  ## what CI runs, in the current environment

lint:
	ruff check .
	ruff format --check .

types:
	mypy

docs:
	sphinx-build -q -W --keep-going -b html docs docs/_build/html

test:
	python -m pytest

slow:  ## by one more than there are cores: some of them wait for ranks that hang
	python -m pytest -m slow --durations=30 -n $$(python -c 'import os; print(os.cpu_count() + 1)')

gpu-sim:  ## the tests that need a GPU, on a simulated one; those of techniques, with all of it there
	python -m pytest -p tests.simulated_gpu.device -m gpu
	python -m pytest -p tests.simulated_gpu.everywhere tests/techniques

gpu:  ## on a machine with GPUs: the tests that need one, and the tables that only one can fill
	python -m pytest -m gpu
	python tools/benchmarks/gpu.py --out docs/benchmarks

matrix:  ## the tests that depend on versions, on every torch and Python that is promised
	python tools/matrix.py

format:
	ruff check --fix .
	ruff format .
