# Two commands for a machine that has only git, make and Python 3.11: `make demo` and `make test`.
# Everything is installed into .venv; running a target again reuses it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BL := $(VENV)/bin/brokerless
PACKAGES := core direct multicast webhooks metrics spark_collector losstest console cli
STAMP := $(VENV)/.installed
# More workers than cores, because many tests wait for processes; tests marked `serial` run alone afterwards.
JOBS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) * 2 )))
# No bytecode or caches of other versions get in the way of the wheel that is checked.
WHEEL_SITE := build/site

.PHONY: help setup demo test check soak bench compare clean wheel format docs

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install the package with everything the tests need

$(STAMP): pyproject.toml constraints.txt tools/setup.py $(wildcard */_speed.c */c/*)
	@$(PYTHON) tools/setup.py $(VENV)
	@touch $@

demo: $(STAMP)  ## run the main job: all that is there, end to end
	@$(PY) tools/demo.py

test: $(STAMP)  ## run the tests (slow soak tests left out)
	@$(PY) tools/system.py
	@$(PY) -m pytest -q -n $(JOBS) --dist loadgroup -m "not slow and not serial"
	@$(PY) -m pytest -q -m "serial and not slow"

soak: $(STAMP)  ## run the long tests too
	@HYPOTHESIS_PROFILE=thorough $(PY) -m pytest -q -m "slow or not slow"

check: $(STAMP) docs  ## format, lint, types on the built wheel, layering and exports, the documentation's site
	@echo "check: ruff format" && $(VENV)/bin/ruff format --check .
	@echo "check: ruff lint" && $(VENV)/bin/ruff check .
	@echo "check: mypy --strict on the wheel" && \
	  MYPYPATH=$(WHEEL_SITE) $(VENV)/bin/mypy $(foreach p,$(PACKAGES),-p brokerless.$(p))
	@echo "check: layering, exports, counters" && $(PY) -m pytest -q tests/test_layout.py
	@echo "check: the wheel itself" && BROKERLESS_WHEEL=$(WHEEL_SITE) PYTHONPATH=$(WHEEL_SITE) \
	  $(PY) -m pytest -q tests/test_wheel.py tests/core/test_frame.py tests/core/ledger/test_ledger.py
	@echo "check: the site" && BROKERLESS_SITE=build/docs $(PY) -m pytest -q tests/test_site.py

docs: $(STAMP) wheel  ## build the documentation into build/docs; fails on broken links
	@PYTHONPATH=$(WHEEL_SITE) NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "docs: build/docs/index.html"

wheel: $(STAMP)
	@rm -rf build/lib* build/bdist* dist $(WHEEL_SITE)
	@$(PY) -m pip -q wheel --no-deps --no-build-isolation -w dist .
	@$(PY) -m pip -q install --no-deps --target $(WHEEL_SITE) dist/*.whl

format: $(STAMP)  ## rewrite the sources in the project's format
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

$(VENV)/.bench: $(STAMP)
	@echo "bench: installing the peers to compare with"
	@$(PY) -m pip -q install --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[bench]"
	@touch $@

bench: $(VENV)/.bench  ## run the benchmarks, peers in the same run; tables go to build/bench
	@for f in core direct multicast webhooks metrics spark presence; do echo "== bench/$$f.py"; $(PY) bench/$$f.py; done

compare: $(VENV)/.bench  ## put brokers and peers beside our transports: installs what Debian has, writes docs/comparison.md
	@$(PY) tools/compare.py

clean:  ## remove everything that the targets made
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
