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

# What needs no GPU, in a quarter of an hour on a machine that does nothing else. COUNTS is a folder of expert
# counts of one model (JSON); without it the two benches of placement are left out.
bench: $(STAMP)
	$(BIN)/python -m bench.service.control_streams
	$(BIN)/python -m bench.service.hop --patience 120
	$(BIN)/python -m bench.experts.cpu_layer --seconds 6 --patience 60
	$(BIN)/python -m bench.service.moves --seconds 180
	$(BIN)/python -m bench.numbers.laws
	$(if $(COUNTS),$(BIN)/python -m bench.balance.placement --counts $(COUNTS))
	$(if $(COUNTS),$(BIN)/python -m bench.balance.replicas --counts $(COUNTS))
	$(BIN)/python -m bench.results_page

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
