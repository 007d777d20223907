# make quickstart   set up, train a target and a draft on real text, distil, decode, show the result
# make test         set up, run the tests (under 15 minutes on two cores)
# make check        lint, types, house rules, fast tests (under a minute)
# make setup        only the environment, .venv
# make test-slow    the slow tests: what takes long, the quickstart's claims in full (under 40 minutes)
# make test-oldest  the tests with the oldest torch and transformers supported
# make bench        speed against peers and how costs grow, on the quickstart's pair
# make peers        OpenVINO GenAI and llama.cpp for bench/speed/peers.py, in .peers (20 minutes)
# make reproduce    a table of docs/results from nothing: TABLE=heads, dry=true for its commands alone
# make docs         the documentation site, into site/ (docs-serve: beside the sources, live)
# make gpu          everything that needs a GPU, on its own Python
# make fmt          format

PYTHON     ?= python3
VENV       ?= .venv
TORCH_SPEC ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
PY         := $(VENV)/bin/python
PEERS      := .peers
OPENVINO   := openvino-genai==2026.4.1.0 optimum-intel==2.2.0
LLAMA_CPP  := llama-cpp-python==0.3.36
CORES      := $(shell getconf _NPROCESSORS_ONLN)

export OMP_NUM_THREADS ?= $(CORES)
# Threads that sleep while they wait: spinning ones halve the speed of a machine that is shared.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: quickstart setup test test-slow test-oldest check links types fmt bench peers reproduce docs docs-serve gpu clean help

help:
	@sed -n 's/^# make/make/p' Makefile

# A torch that the Python at hand already has (a GPU build, say) is reused; otherwise TORCH_SPEC is
# installed first and alone, and everything later is held to it, so that no dependency replaces it.
$(VENV)/.torch:
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  echo "setup: reusing the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  echo "setup: installing $(TORCH_SPEC)"; $(PYTHON) -m venv $(VENV) && $(PY) -m pip install -q $(TORCH_SPEC); \
	fi
	@touch $@

$(VENV)/constraints.txt: $(VENV)/.torch $(CONSTRAINTS)
	@$(PY) -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > $@
	@grep -v '^torch==' $(CONSTRAINTS) >> $@

$(VENV)/.ready: $(VENV)/constraints.txt pyproject.toml
	@echo "setup: installing draftsmith and what it needs into $(VENV)"
	@$(PY) -m pip install -q -c $(VENV)/constraints.txt -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "setup: installing the test tools, deepspeed and wandb into $(VENV)"
	@$(PY) -m pip install -q -c $(VENV)/constraints.txt -e ".[dev,distributed,track]"
	@touch $@

setup: $(VENV)/.ready

quickstart: $(VENV)/.ready
	@$(PY) -m draftsmith quickstart

# One process a core, each on one thread: most tests run models that are too small for two.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/.ready-dev
	$(PY) -m pytest -q -n $(CORES) --dist worksteal --durations=15

test-slow: $(VENV)/.ready-dev
	$(PY) -m pytest -q --durations=15 -m slow

# The oldest supported pair, in an environment of its own.
test-oldest:
	$(MAKE) test VENV=.venv-oldest TORCH_SPEC=torch==2.11.0 CONSTRAINTS=constraints-oldest.txt

check: $(VENV)/.ready-dev types
	$(PY) -m pytest -q -x tests/test_house.py tests/train/losses tests/decode/verify/test_verify.py tests/decode/test_sampling.py
	@$(PY) tests/tools/budgets.py

# Links that spell the import names: for type checkers, which can't follow setuptools' folder mapping,
# and for machines where nothing is installed.
links:
	@mkdir -p .typing/draftsmith
	@for room in models decode train recipes bench; do ln -sfn ../../$$room .typing/draftsmith/$$room; done
	@for file in draftsmith/*.py draftsmith/py.typed; do ln -sfn ../../$$file .typing/draftsmith/; done

types: $(VENV)/.ready-dev links
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	MYPYPATH=.typing $(VENV)/bin/mypy

fmt: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.ready-dev
	$(PY) bench/speed/losses.py
	$(PY) bench/speed/decode.py
	$(PY) bench/speed/cost.py

peers: $(PEERS)/openvino/.ready $(PEERS)/llama.cpp/.ready

# Its own transformers, older than ours, and the same torch: pinned to the build, so that none with
# CUDA comes in its place. torchvision, of another build, wouldn't import beside it.
$(PEERS)/openvino/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(TORCH_SPEC)
	$(@D)/bin/python -c "import torch; print('torch==' + torch.__version__)" > $(@D)/constraints.txt
	$(@D)/bin/pip install -q -c $(@D)/constraints.txt $(OPENVINO)
	$(@D)/bin/pip uninstall -q -y torchvision
	@touch $@

# The sdist of its Python binding holds llama.cpp whole, with its converter.
$(PEERS)/llama.cpp/.ready:
	mkdir -p $(@D)
	$(PYTHON) -m pip download -q --no-deps --no-binary llama-cpp-python -d $(@D) $(LLAMA_CPP)
	tar xzf $(@D)/*.tar.gz --strip-components=1 -C $(@D)
	cmake -S $(@D)/vendor/llama.cpp -B $(@D)/build -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF
	nice -n 10 ninja -C $(@D)/build -j$(CORES) llama-speculative-simple llama-server
	@touch $@

reproduce: $(VENV)/.ready-dev
	@$(PY) bench/reproduce.py table=$(TABLE) $(if $(dry),dry=$(dry)) $(if $(more),'more=$(more)')

# An environment of its own, without torch: pages are made from sources that nobody imports.
$(VENV)-docs/.ready: docs/requirements.txt
	@echo "setup: installing what builds the site into $(VENV)-docs"
	@$(PYTHON) -m venv $(VENV)-docs && $(VENV)-docs/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

docs: export PYTHONPATH = .typing
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)-docs/.ready links
	$(VENV)-docs/bin/mkdocs build -q --strict

docs-serve: export PYTHONPATH = .typing
docs-serve: $(VENV)-docs/.ready links
	$(VENV)-docs/bin/mkdocs serve

# On the GPU machine, with its own Python; nothing is installed.
gpu: links
	PYTHONPATH=.typing $(PYTHON) bench/speed/gpu.py $(GPU_FLAGS)

clean:
	rm -rf $(VENV) $(VENV)-docs .typing site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
