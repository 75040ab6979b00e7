# `make` alone lists the targets. Everything happens in .venv; nothing needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SOURCES := pyproject.toml ext/build.py $(shell find ext -name '*.pyx' -o -name '*.pxd' -o -name '*.h')

.PHONY: fuzz package soak soak-sites soak-entries replay peers help demo test check bench venv format checked clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

demo: $(STAMP) ## sixteen hospitals train a classifier together on this machine, in about half a minute
	@$(BIN)/ibshell demo

test: $(STAMP) ## every test a clone can run
	@$(BIN)/python tests/run.py

package: $(STAMP) ## build the wheel, install it alone, run the demo from it
	@$(BIN)/python -m pytest tests/package/wheel.py

fuzz: $(STAMP) ## every parser of foreign text under atheris: make fuzz SECONDS=30 PARSER=plan
	@$(BIN)/python -m pip install -q atheris
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(or $(SECONDS),30) $(PARSER)

soak: $(STAMP) ## simulated worlds until Ctrl-C; a failing seed is printed with its smallest trace
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--from $(SEED))

soak-sites: $(STAMP) ## 250, 500 and 1,000 simulated sites against one hub, the last for an hour (MINUTES=60): memory, load, latency
	@$(BIN)/python tests/soak/sites.py --minutes $(or $(MINUTES),60) $(if $(SITES),--sites $(SITES))

soak-entries: $(STAMP) ## a site that has written a million entries starts again: how long that takes (ENTRIES=1000000)
	@$(BIN)/python tests/soak/entries.py --entries $(or $(ENTRIES),1000000)

replay: $(STAMP) ## one simulated world again: make replay SEED=4711
	@PYTHONPATH=tests $(BIN)/python -m simulation $(SEED)

check: $(STAMP) ## format, lint, strict types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

peers: .venv-peers/flower/.ready .venv-peers/tenseal/.ready ## what `make bench` compares with, each in a virtual environment of its own

.venv-peers/flower/.ready:
	@$(PYTHON) -m venv .venv-peers/flower
	@.venv-peers/flower/bin/python -m pip install --quiet --disable-pip-version-check 'flwr==1.42.0' numpy
	@touch $@

.venv-peers/tenseal/.ready:
	@$(PYTHON) -m venv .venv-peers/tenseal
	@.venv-peers/tenseal/bin/python -m pip install --quiet --disable-pip-version-check 'tenseal==0.3.18' numpy
	@touch $@

bench: $(STAMP) peers ## measurements, side by side with what users would pick instead
	@$(BIN)/ibshell bench

venv: $(STAMP) ## just the environment, in .venv

$(STAMP): $(SOURCES)
	@sh ext/preflight.sh "$(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ibshell into $(VENV) (once; a minute or so)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,demo,etcd]'
	@touch $@

format: $(STAMP) ## rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

checked: $(STAMP) ## unit and property tests on kernels compiled with every run-time check
	@IBSHELL_EXT_CHECKED=1 $(BIN)/python -c "import setuptools; setuptools.setup()" -q build_ext --inplace
	@$(BIN)/python -m pytest tests/unit tests/property; status=$$?; \
	  $(BIN)/python -c "import setuptools; setuptools.setup()" -q build_ext --inplace; exit $$status

clean: ## remove the environment and everything built
	@rm -rf $(VENV) .venv-peers build dist *.egg-info
	@find fedpool agent ibshell -name '*.so' -delete
