# The checks of a change: `make check`.
.PHONY: check format docs benchmarks

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	pytest

format:
	ruff check --fix .
	ruff format .

docs:
	python docs/generate_configuration.py
	python docs/draw_front.py
	python docs/run_blocks.py
	python docs/run_notebooks.py --write
	mkdocs build --strict

benchmarks:
	python benchmarks/all.py
