# `make train` and `make test` need only Python >= 3.10 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-deep test-nightly lint docs dist locks bench clean

$(VENV)/.installed: pyproject.toml setup.py proto/elasticcb.proto
	@$(PYTHON) -c 'import sys; v = sys.version_info; assert (3, 10) <= v < (3, 14), "ElasticCB needs Python 3.10 to 3.13; this is %d.%d. Name another: make PYTHON=python3.12" % v[:2]'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[test,lint]"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[bench]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	@touch $@

train: $(VENV)/.installed  ## trains a digit classifier on a local cluster and exports it
	$(BIN)/elasticcb train --config model_zoo/digits/job.yaml

# Tests start many processes: what Python compiles for one of them is there for the others.
unexport PYTHONDONTWRITEBYTECODE

# Half of the time of a test of processes is waiting: three run at once, in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder --durations=20

test: $(VENV)/.installed-test  ## each promise once, in some minutes; TESTS="tests/ps -x" names some
	$(PYTEST) $(TESTS)

test-deep: $(VENV)/.installed-test  ## what is marked `deep`: all cases, long walks, fuzzing
	$(PYTEST) -m deep $(TESTS)

# Keras's nightly release in front of the packages of $(VENV), and what depends on Keras most.
NIGHTLY := $(VENV)-nightly
WITH_NIGHTLY := tests/backends tests/test_optimizer_state.py tests/test_optimizer_capture.py \
	tests/integration/test_python_api.py tests/integration/test_equality_with_fit.py
PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

test-nightly: $(VENV)/.installed-test  ## some tests with the next release of Keras, as it is today
	$(BIN)/python -m venv --without-pip $(NIGHTLY)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" \
		> "$$($(NIGHTLY)/bin/python $(PACKAGES))/packages.pth"
	$(NIGHTLY)/bin/python -m pip install --quiet --upgrade --pre keras-nightly
	$(NIGHTLY)/bin/python -m pytest --numprocesses=3 --dist=loadfile $(or $(TESTS),$(WITH_NIGHTLY))

lint: $(VENV)/.installed-test  ## code, types and wording
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python lint/prose.py

docs: $(VENV)/.installed-docs  ## the documentation as a site, build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# With tensorflow-cpu in place of tensorflow, as the Dockerfile has it.
LOCK := $(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --python-version=3.10 \
	--custom-compile-command="make locks" --extra=kubernetes --extra=s3 pyproject.toml
TENSORFLOW := $(shell sed -n 's/^ARG TENSORFLOW_VERSION=//p' Dockerfile | head -n 1)

locks: $(VENV)/.installed-test  ## what the Dockerfile installs, with hashes, as the package indexes have it today
	echo 'tensorflow-cpu==$(TENSORFLOW); platform_machine == "x86_64"' \
		| $(LOCK) --no-emit-package=tensorflow --output-file=deploy/image/cpu.lock -
	echo 'tensorflow[and-cuda]==$(TENSORFLOW)' | $(LOCK) --output-file=deploy/image/gpu.lock -

dist: $(VENV)/.installed  ## a wheel and a source archive, checked, in dist/
	$(BIN)/pip install --quiet --editable ".[dist]"
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/.installed-bench  ## compares throughput with Keras and ParameterServerStrategy; FLAGS="--quick" for less
	$(BIN)/python benchmarks/throughput.py --into=docs/benchmarks.md $(FLAGS)

clean:
	rm -rf $(VENV) $(NIGHTLY) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f elasticcb/proto/*_pb2*.py elasticcb/proto/*_pb2*.pyi
