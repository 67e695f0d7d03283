# make book       the HTML, in _build/html
# make test       every test: notebooks, package, tools, and the site in a browser
# make chapters   after editing a chapter: its module, its outputs, the generated pages;
#                 what is still owed, of those that differ from the last commit,
#                 or of CHAPTERS="02 03", or of =all

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Whole files, in their order (the longest stand early), on each core up to four.
SIDE_BY_SIDE = -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
READY = $(VENV)/requirements-installed
# Hundreds of processes import the same modules: compiled once, whatever the machine's setting.
export PYTHONDONTWRITEBYTECODE =

.PHONY: book test chapters
.DEFAULT_GOAL := book

book: $(READY)
	$(RUN) tools build_book

test: $(READY)
	$(RUN) -m pytest $(SIDE_BY_SIDE)

CHAPTERS ?= changed

chapters: $(READY)
	$(RUN) -m ruff format
	$(RUN) -m ruff check
	$(RUN) tools tangle
	$(RUN) tools execute $(filter-out all,$(CHAPTERS))
	$(RUN) tools equations
	$(RUN) tools speed
	$(RUN) tools owed $(filter-out all,$(CHAPTERS))

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("attnlib needs Python 3.11 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	@touch $@
