# `make check` runs the checks of a change.
.PHONY: check test-room format docs benchmarks

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	pytest

# Rooms of the package that have a folder of tests.
ROOMS := $(sort $(filter $(notdir $(patsubst %/,%,$(wildcard foundry/*/))),$(notdir $(patsubst %/,%,$(wildcard tests/*/)))))

# The tests that a change in one room of foundry/ is most likely to break: make test-room ROOM=objectives
test-room:
	$(if $(filter $(words $(ROOM)),1),,$(error ROOM="$(ROOM)": must be one room; one of $(ROOMS)))
	$(if $(filter $(ROOM),$(ROOMS)),,$(error ROOM="$(ROOM)": no such room; one of $(ROOMS)))
	pytest tests/$(ROOM) tests/test_rooms.py tests/parity/test_raw_loop.py

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
