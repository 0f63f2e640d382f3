# Two commands, each of which does all of its own set-up: `make reproduce` (the main job) and `make test` (the whole suite).
# They need Python 3.11 or newer with pip, and nothing else.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: reproduce test lint clean

reproduce: $(VENV)/.core
	$(VENV)/bin/twoscale reproduce --preset tiny --with-bundled --effort short $(ARGS)

# Two files of tests at a time; threads that wait sleep, so that they do not get in each other's way.
test: $(VENV)/.test
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("twoscale needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# The constraints pin every version that was tested; torch above all, whose open range pulls gigabytes of CUDA packages.
$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV)
