# Two commands on a fresh machine: `make train` and `make test`. Everything they make stays in this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The device's own jax: CUDA (12 for a driver before 13) or TPU where one is, plain CPU elsewhere; EXTRA=cuda,
# EXTRA=cuda12, EXTRA=tpu or EXTRA= says otherwise.
EXTRA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && { nvidia-smi | grep -q 'CUDA Version: 12' && echo cuda12 || echo cuda; } || { ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1 && echo tpu; })
# Memory in huge pages (glibc; others do not look at it): on a CPU, a step's temporary memory is mapped anew every time,
# and a fifth of a tiny step was spent on that, page by page.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
comma := ,
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python keeps what it has compiled of its modules: of those that are used, not of all that is installed.
unexport PYTHONDONTWRITEBYTECODE
# Where pip is told to look for packages, as uv wants to hear it.
PLACES = $(shell $(BIN)/python -m pip config list 2>/dev/null | \
	sed -nE "s/^[^=]*\.(index-url|extra-index-url|find-links)='(.*)'$$/\1 \2/p" | \
	while read key all; do for one in $$all; do echo "--$$key $$one"; done; done)
# uv installs in a third of pip's time; where there is none, or it does not find what pip would, pip does it.
install = $(BIN)/python -m pip install --quiet uv 2>/dev/null && \
	$(BIN)/uv pip install --quiet --cache-dir .cache/uv --python $(BIN)/python --index-strategy unsafe-best-match \
	$(PLACES) -e '$(1)' 2>/dev/null; by_uv=$$?; rm -rf .cache/uv; \
	[ $$by_uv = 0 ] || $(BIN)/python -m pip install --quiet --no-cache-dir --no-compile -e '$(1)'

.PHONY: train test test-long lint docs clean

train: $(VENV)/.installed
	$(BIN)/python -m nash_mhc.train $(ARGS)

# The checkers have their say at the end, and run beside the tests.
test: $(VENV)/.installed-dev
	@mkdir -p .cache; $(MAKE) --no-print-directory lint >.cache/lint.log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -m 'not long' --numprocesses 3 --no-loadscope-reorder $(ARGS); tested=$$?; \
	wait $$lint; linted=$$?; cat .cache/lint.log; exit $$((tested ? tested : linted))

# Fault matrices, many seeds: what is too long for every change. ARGS='-k faults' runs some of them.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m long --numprocesses 2 --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of docs/ as a site, in site/. With --quiet, mkdocs would not count the warnings that `strict` ends it for.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "site/index.html is there; its search needs a server: $(BIN)/python -m http.server --directory site"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nash_mhc needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (once, half a minute) ..."
	@$(call install,.$(if $(EXTRA),[$(EXTRA)]))
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (once, half a minute) ..."
	@$(call install,.[dev$(addprefix $(comma),$(EXTRA))])
	touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) ..."
	@$(call install,.[docs$(addprefix $(comma),$(EXTRA))])
	touch $@

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
