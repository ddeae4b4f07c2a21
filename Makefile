# Everything here starts from a clean clone with python3 and make; the rest is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.dflash-hf-installed

# Small models on small tensors: more threads than one per worker only wait for each other. Tests never use the network.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MPLBACKEND=Agg

.PHONY: help venv test lint format coverage demo clean

help:
	@echo "make test      install into $(VENV), lint, run the tests"
	@echo "make demo      install into $(VENV), train and run a tiny drafter on the CPU"
	@echo "make lint      ruff check and ruff format --check"
	@echo "make format    apply what ruff can fix"
	@echo "make coverage  the tests with branch coverage"
	@echo "make venv      only install"
	@echo "make clean     remove builds, caches and .venv"

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[test,train,plots,hub]' -c constraints.txt
	@touch $@

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --cov --cov-report=term

demo: $(STAMP)
	$(BIN)/dflash demo

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find modeling src hub_cards tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
