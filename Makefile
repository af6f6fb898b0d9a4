# The two commands: `make demo` and `make test`. Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STAMP := $(VENV)/.installed

.PHONY: demo test lint proto bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m bench.service.demo

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(STAMP)
	$(BIN)/python -m moeserve.proto.generate

bench: $(STAMP)
	$(BIN)/python -m bench.service.hop
	$(BIN)/python -m bench.experts.cpu_layer

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
