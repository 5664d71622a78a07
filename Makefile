# `make test` on a fresh machine needs only Python 3.11+ and make: it builds .venv from the pinned set.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := $(VENV)-docs
DOCS_READY := $(DOCS)/.ready
# One thread per worker: two workers with two threads each would fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 -q

.PHONY: help setup test test-slow test-all lint format docs demo clean

help:  ## what the targets do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,lora]'
	@touch $@

setup: $(READY)  ## create .venv with the pinned dependencies

test: $(READY)  ## the tests, in under ten minutes on two cores
	$(PYTEST) -m 'not slow'

test-slow: $(READY)  ## what `make test` leaves out
	$(PYTEST) -m slow

test-all: test test-slow  ## everything, in under forty minutes

lint: $(READY)  ## ruff and mypy
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(READY)  ## let ruff rewrite the sources
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# An environment of its own: the site is built without torch, and the tests without MkDocs.
$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $(DOCS)/requirements.txt
	@touch $@

docs: $(DOCS_READY)  ## the documentation as a site in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

demo: $(READY)  ## set up and run `oelm demo`
	$(RUN)/oelm demo

clean:  ## remove the environment and build output
	rm -rf $(VENV) $(DOCS) site build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
