# The two commands: `make demo` and `make test`. Both make their own virtual environment first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# On the path, or among pyenv's.
PYTHON310 ?= $(shell for python in python3.10 "$$(pyenv root 2>/dev/null)"/versions/3.10*/bin/python3.10; do \
    "$$python" --version >/dev/null 2>&1 && echo "$$python" && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO   := .demo
HOST   ?= 127.0.0.1
PORT   ?= 5000

.PHONY: demo serve serve-visualdl test test-long test-trainers test-legacy test-all faults bench lint clean help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 18

demo: $(VENV)/.demo  ## train a small GPT three ways on Chinese text and rank the runs by cost
	@$(BIN)/python examples/demo.py --directory $(DEMO)

serve: $(VENV)/.demo  ## open MLflow with the Token cost page over the demo's runs
	@test -f $(DEMO)/mlflow.db || { echo "No runs yet: 'make demo' first."; exit 2; }
	@echo "MLflow      http://$(HOST):$(PORT)/"
	@echo "Token cost  http://$(HOST):$(PORT)/tokens/"
	@$(BIN)/mlflow server --app-name tokens --host $(HOST) --port $(PORT) \
	    --backend-store-uri sqlite:///$(CURDIR)/$(DEMO)/mlflow.db --default-artifact-root $(CURDIR)/$(DEMO)/artifacts

serve-visualdl: $(VENV)/.demo  ## open VisualDL over the demo's logs
	@test -d $(DEMO)/visualdl || { echo "No logs yet: 'make demo' first."; exit 2; }
	@$(BIN)/visualdl-tokens --logdir $(DEMO)/visualdl --host $(HOST)

test: $(VENV)/.test lint  ## run every test that fits in ten minutes on two cores
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-trainers: .venv-nlp/.test .venv-formers/.test  ## test PaddleNLP's and PaddleFormers' Trainers (five minutes)
	@.venv-nlp/bin/python -m pytest tests/trainers
	@.venv-formers/bin/python -m pytest tests/trainers

test-long: $(VENV)/.test  ## run the long matrices that `make test` leaves out
	@$(BIN)/python -m pytest -m long -n 2

test-legacy: .venv-legacy/.test  ## test PaddleNLP 2.8.1's Trainer on Paddle 2.6.2 (wants Python 3.10; four minutes)
	@.venv-legacy/bin/python -m pytest tests/trainers

test-all: test test-long test-trainers $(if $(PYTHON310),test-legacy)  ## run all of them

faults: $(VENV)/.test  ## inject 1,000 faults into real jobs and write docs/faults.md (ten minutes)
	@$(BIN)/python -m tests.faults --count 1000 --seed 1 --report docs/faults.md

bench: $(VENV)/.test  ## measure what docs/benchmarks.md says (four minutes)
	@$(BIN)/python -m benchmarks

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:  ## remove the virtual environment and everything the demo made
	rm -rf $(VENV) .venv-nlp .venv-formers .venv-legacy $(DEMO) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)

# The stamps make a second run start at once; they are renewed when the package's needs change.
$(VENV)/.demo: $(BIN)/python setup.py constraints.txt
	@echo "Installing what the demo needs (PaddlePaddle, MLflow, VisualDL, Dash: about 2 GB, a few minutes once)"
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need"
	@$(PIP) -e '.[test]'
	@touch $@

# Neither library installs beside what the other one, or the demo, needs.
.venv-nlp/.test: TRAINER := paddlenlp==3.0.0b4
.venv-formers/.test: TRAINER := paddleformers==1.2.0
.venv-legacy/.test: TRAINER := paddlenlp==2.8.1
.venv-legacy/.test: PYTHON := $(or $(PYTHON310),python3.10)
.venv-%/.test: setup.py constraints-%.txt
	@echo "Installing $(TRAINER) into .venv-$* (about 2 GB, a few minutes once)"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-$*.txt \
	    -e . paddlepaddle '$(TRAINER)' mlflow visualdl pytest
	@touch $@
