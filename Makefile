# `make train` and `make test` need only Python 3.11 or newer, and set up the rest.
#   make test PYTHON=python3.12    with another interpreter, in a folder of its own
#   make test ARGS='-k layout'     with options for pytest; the same for train and bench
#   JAX_ENABLE_COMPILATION_CACHE=false make test    without what earlier runs compiled

PYTHON ?= python3
version := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(version))
python := $(VENV)/bin/python
# A worker a core; the tests of a file stay together, for they share what they compile.
pytest := $(python) -m pytest -n logical --maxprocesses 4 --dist loadfile
# The lowest versions that pyproject.toml admits, as constraints for pip.
lowest := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*(x.replace(">=", "==").split(",")[0] for x in project["dependencies"]), sep="\n")

# A docstring of the library states its subject in its first line: words that stand for
# one are refused there.
no_first_line := '^(?!\s*r?""").*'
phrases := '(?:(?:so|as) many|of which|th(?:at|ose) of|the same for|for nobody)\b|[\w-]+'
schema := $(VENV)/bin/check-jsonschema --builtin-schema vendor

# Warnings are errors.
sphinx := JAX_PLATFORMS=cpu $(python) -m sphinx -qW --keep-going -d docs/_build/doctrees

.PHONY: help train train-lm smoke data test test-slow test-core test-lowest test-newest test-all \
  trainers trainers-newest breaks mutants budgets nightly lint types docs release-check bench \
  bench-quick links evidence evidence-status evidence-times gpu-check ptx-check aot aot-check test-ray clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

train: $(VENV)/.installed-examples  ## train the example with several codecs and compare
	$(python) -m examples.image_classification --compare $(ARGS)

train-lm: $(VENV)/.installed-examples  ## the same of the language model
	$(python) -m examples.language_model --compare $(ARGS)

smoke: $(VENV)/.installed-examples  ## train some steps, which must leave a table and a plot
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(python) -m examples.image_classification --compare f32 qsgd-4 --steps 4 --evaluate-every 2 \
	  --data-dir $$folder/data --output $$folder/results && \
	test -s $$folder/results/summary.csv -a -s $$folder/results/curves.png

data: $(VENV)/.installed-examples  ## prepare Fashion-MNIST, MNIST and the Brown corpus in datasets/
	$(python) -W ignore -m benchmarks.study.mirrors $(ARGS)

# Exit code 5: of this kind ARGS chooses none.
define run-tests
@$(pytest) -m "not bits" $(ARGS); plain=$$?; \
$(pytest) --dist worksteal -m bits --optimize $(ARGS); bits=$$?; \
for status in $$plain $$bits; do [ $$status = 0 -o $$status = 5 ] || exit $$status; done; \
[ $$plain = 0 -o $$bits = 0 ]
endef

test: $(VENV)/.installed-dev  ## run the tests and doctests, but for slow ones
	$(run-tests)

test-slow: pytest += --only-slow
test-slow: $(VENV)/.installed-dev  ## run slow tests alone, with ARGS='--slow all' or a share of them
	$(run-tests)

test-core: pytest += --ignore tests/benchmarks --ignore tests/examples
test-core: $(VENV)/.installed-test  ## the same of the library alone, which needs few packages
	$(run-tests)

test-lowest:  ## the same on the lowest versions of JAX, optax and NumPy
	@$(MAKE) VENV=.venv-lowest .venv-lowest/.made-by-$(version)
	@$(PYTHON) -c '$(lowest)' > .venv-lowest/constraints.txt
	@PIP_CONSTRAINT=.venv-lowest/constraints.txt $(MAKE) VENV=.venv-lowest test-core

# The newest JAX needs Python 3.12. A shim of pyenv runs what PYENV_VERSION says.
NEWEST ?= 3.12
on-newest = @if newest=$$(PYENV_VERSION=$(NEWEST) python$(NEWEST) -c 'import sys; print(sys.executable)'); \
  then $(MAKE) PYTHON="$$newest" $(1); else echo "skipped: $@, there is no python$(NEWEST) here"; fi
test-newest:  ## run the library's tests on the newest JAX, if there is a Python for it
	$(call on-newest,test VENV=.venv-newest \
	  ARGS='$(ARGS) --ignore tests/benchmarks --ignore tests/project')

test-all: $(VENV)/.installed-dev  ## run all tests, compiled as users compile
	$(pytest) --slow all --optimize $(ARGS)

# In an environment of its own: they bring much, and may hold other packages back.
GROUP = trainers
trainers:  ## run trainers of other projects, made to send 4 bits
	@$(MAKE) VENV=.venv-$(GROUP) .venv-$(GROUP)/.installed-$(GROUP)
	KERAS_BACKEND=jax .venv-$(GROUP)/bin/python -m pytest --slow all tests/examples/test_keras.py \
	  tests/examples/test_trainers.py tests/local_steps/test_drjax.py $(ARGS)

trainers-newest:  ## the same of MaxText and levanter, if there is a Python for them
	$(call on-newest,trainers GROUP=$@ ARGS='-k "maxtext or levanter" $(ARGS)')

breaks: $(VENV)/.installed-dev  ## break the library on purpose: the tests must see it
	$(python) -m tests.breaks.run $(ARGS)

mutants: $(VENV)/.installed-mutants  ## change what the last landing touched: do the tests see it?
	$(python) -m tests.breaks.mutants $(ARGS)

budgets: $(VENV)/.installed-lint  ## lower tests/project/budgets.toml to what is there
	@$(python) -m tests.project.budgets $(ARGS)

nightly:  ## run all checks of .ci/steps, of which a merge takes some in turns, the cheapest first
	@bash .ci/run nightly $(ARGS)

lint: $(VENV)/.installed-lint  ## check code, pages, words, forms and workflows
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(VENV)/bin/rumdl check .
	$(VENV)/bin/codespell
	$(VENV)/bin/codespell --dictionary docs/inside/first-lines.txt \
	  --regex $(phrases) --ignore-regex $(no_first_line) gradcomp kernels
	$(schema).github-workflows .github/workflows/*
	$(schema).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(schema).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*))
	$(schema).dependabot .github/dependabot.yml
	$(schema).citation-file-format CITATION.cff
	$(VENV)/bin/zizmor --quiet --offline .github

types: $(VENV)/.installed-lint  ## check types, and those of programs of users
	$(python) -m mypy
	$(python) -m pyright --pythonpath $(python)

release-check: $(VENV)/.installed-release  ## build both archives, and test them as installed
	$(python) -m tests.project.release_check

# What Sphinx wrote before is not needed, and may be of names that are gone.
docs: $(VENV)/.installed-docs  ## build the site; a public name without a page is an error
	@rm -rf docs/_build docs/api/generated
	$(sphinx) -b html docs docs/_build/html
	$(sphinx) -b coverage docs docs/_build/coverage
	@echo "The pages: $(CURDIR)/docs/_build/html/index.html"

bench: $(VENV)/.installed-bench  ## time the codecs against a memory copy
	$(python) -m benchmarks.codecs.speed $(ARGS)

bench-quick: $(VENV)/.installed-study  ## run every benchmark for some seconds
	$(python) -m benchmarks.quick $(ARGS)

links: $(VENV)/.installed-bench  ## time the exchanges over slow links (as root, half an hour)
	$(python) -m benchmarks.links speed --output benchmarks/results/links $(ARGS)

evidence: $(VENV)/.installed-study  ## train in the background what no record has, at low priority
	@$(python) -W ignore -m benchmarks.study.mirrors
	@$(python) -m benchmarks.study.queue.run $(ARGS)

evidence-status: $(VENV)/.installed-study  ## say how far these trainings are
	@$(python) -W ignore -m benchmarks.study.queue.status

evidence-times: $(VENV)/.installed-study  ## time steps on hosts (as root, an hour or two)
	@$(python) -W ignore -m benchmarks.study.mirrors
	@$(python) -W ignore -m benchmarks.study run queue --ways timed \
	  --output benchmarks/results/study/evidence

# In an environment of its own, of 1.3 GB.
test-ray:  ## train on Ray, kill a node and add one
	@$(MAKE) VENV=.venv-ray .venv-ray/.installed-ray
	.venv-ray/bin/python -m pytest --slow all tests/examples/test_ray_train.py $(ARGS)

# For a machine with a GPU and no package index: nothing is installed.
gpu-check: export PYTHONPATH := $(CURDIR)
gpu-check:  ## compare and time the kernels on the GPU of this machine, which then serve
	@status=0; \
	$(PYTHON) -W ignore -m benchmarks.gpu.check --seconds 240 || status=$$?; \
	[ $$status != 77 ] || exit 77; \
	$(PYTHON) -W ignore -m benchmarks.gpu.speed --seconds 240 \
	  --checked benchmarks/results/gpu/gpu_check.json $(ARGS) || status=1; \
	$(PYTHON) -W ignore -m benchmarks.gpu.served || status=1; \
	exit $$status

# In an environment of its own: where JAX finds this back end, it tries to start it.
ptx-check:  ## compile the kernels for Hopper without a GPU
	@$(MAKE) VENV=.venv-cuda .venv-cuda/.installed-cuda
	.venv-cuda/bin/python -W ignore -m benchmarks.gpu.ptx $(ARGS)

# In an environment of its own, too, of 1 GB.
aot:  ## compile codecs and train steps for TPUs and GPUs that are not here
	@$(MAKE) VENV=.venv-accelerators .venv-accelerators/.installed-accelerators
	.venv-accelerators/bin/python -W ignore -m benchmarks.compilers $(ARGS)

aot-check: aot  ## the same, and the tests of its tables
	.venv-accelerators/bin/python -m pytest -n 0 tests/benchmarks/test_compilers.py

clean:  ## remove virtual environments, builds and caches
	rm -rf .venv .venv-* dist docs/_build docs/api/generated .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The package in place, with one of its dependency groups, which pip knows since 25.1.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.made-by-$(version)
	$(python) -m pip install 'pip>=25.1'
	$(python) -m pip install --editable . --group $*
	@touch $@

$(VENV)/.made-by-$(version):
	@test ! -e $(VENV) || { echo "$(VENV) was not made by $(PYTHON) $(version):" \
	  "run 'make clean', or choose another folder with VENV=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $@
