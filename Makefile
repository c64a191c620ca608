# make book | serve | test | wheel | clean.  Needs Python >= 3.11 with pip and venv, and nothing else.
PYTHON ?= python3
JOBS   ?= 2
PORT   ?= 8000
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: help book serve test wheel freeze clean

help:
	@echo "make book    install into .venv, execute every notebook, render _build/html"
	@echo "make serve   show the book on http://127.0.0.1:$(PORT)"
	@echo "make test    unit tests, notebooks against their stored outputs, the rendered book in a browser"
	@echo "make wheel   build dist/linattn_edu-*.whl, the file to upload to Colab"
	@echo "make clean   remove what was built; .venv stays"

book: $(STAMP)
	@$(BIN)/python book/build.py --jobs $(JOBS)

serve:
	@test -f _build/html/index.html || { echo "There is no book yet: run \`make book\` first."; exit 1; }
	@echo "The book is at http://127.0.0.1:$(PORT)   (Ctrl-C stops)"
	@$(PYTHON) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

# One pytest run for everything, so that its summary is the whole verdict.
# A file (notebook or test module) stays on one worker; tests/conftest.py says so.
test: $(STAMP)
	@$(BIN)/python -m pytest $(wildcard notebooks) tests -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with tests/nbval.cfg

wheel: $(STAMP)
	@rm -rf build
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -l dist/*.whl

$(STAMP): requirements.txt book/constraints.txt tests/oracles.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt -c book/constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/oracles -r tests/oracles.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# For maintainers, after a change of requirements.txt: freeze what this .venv holds.
freeze:
	@{ echo "# Everything that requirements.txt pulled in when it was last tested. Written by \`make freeze\`."; \
	  $(BIN)/python -m pip freeze --exclude linattn_edu --exclude setuptools | sed 's/+cpu//'; } > book/constraints.txt

clean:
	rm -rf _build build dist *.egg-info .pytest_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print | xargs rm -rf
