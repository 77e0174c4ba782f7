# `make help` lists what there is. Everything is installed into .venv; nothing outside of the clone is changed but pip's
# and the corpus' caches.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test parity contract slow soak exits lint format spell types coverage hooks bench kernels clean

help:
	@echo "make train   set up .venv and train the tiny model on real text (examples/quickstart.yaml)"
	@echo "make test    set up .venv for tests and run them"
	@echo "make parity  every topology against one process (a part of it is in make test)"
	@echo "make contract features of Lightning, one by one, against plain Lightning (a part of it is in make test)"
	@echo "make slow    tests of the commands that take long (benchmarks)"
	@echo "make soak    kill training 50 times while it saves, and count what survives"
	@echo "make exits   100 short runs of every pipeline schedule and launcher: does each end cleanly? (an hour)"
	@echo "make lint    ruff: rules and format"
	@echo "make format  let ruff fix what it can"
	@echo "make spell   codespell over the repository"
	@echo "make types   mypy over the whole package"
	@echo "make coverage share of lines that the tests of model, parallel and data run"
	@echo "make hooks   let git run lint, format and spelling before each commit"
	@echo "make bench   training speed against Hugging Face's model, on this machine"
	@echo "make kernels compile the GPU kernels for SM 80, 90 and 100 (no GPU needed): registers, memory, instructions"
	@echo "make clean   remove .venv, caches and build outputs (runs/ stays)"
	@echo "PYTHON=/path/to/python3.12 chooses the interpreter of a new .venv (3.11 or newer)."

train: $(VENV)/.installed
	$(BIN)/olmoe-lightning fit --config examples/quickstart.yaml

# Files at once; each test of a file meets the processes and the data that the file has made.
WORKERS ?= 2

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Of the rooms whose tests run in one process; what workers run is not in the figure.
coverage: $(VENV)/.installed-test
	$(BIN)/python -m pytest --cov --cov-report= --cov-fail-under=1 tests/model tests/parallel tests/data tests/test_config.py

parity: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/parity tests/checkpoint -m "parity or not parity and not slow"

contract: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/lightning_contract -v -m "contract or not contract"

slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

soak: $(VENV)/.installed-test
	$(BIN)/python tests/checkpoint/soak.py --kills 50

exits: $(VENV)/.installed-test
	$(BIN)/python tests/training/exits.py --runs 100 --forked
	$(BIN)/python tests/training/exits.py --runs 5

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

spell: $(VENV)/.installed-test
	$(BIN)/codespell

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not know that callbacks/ and plugins/ are installed inside of olmoe_lightning (setuptools' package-dir), so
# it is shown a package of links in which they are.
types: $(VENV)/.installed-test
	@rm -rf build/types && mkdir -p build/types/olmoe_lightning
	@ln -s "$(CURDIR)"/olmoe_lightning/* "$(CURDIR)/callbacks" "$(CURDIR)/plugins" build/types/olmoe_lightning/
	cd build/types && "$(abspath $(BIN))/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p olmoe_lightning

hooks: $(VENV)/.installed-test
	$(BIN)/pre-commit install

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/train_step.py

kernels: $(VENV)/.installed
	$(BIN)/python -m olmoe_lightning.kernels.gpu.compile

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

# The stamps are younger than the two files that say what to install, or the installation is repeated.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) -e ".[test]"
	@touch $(VENV)/.installed $@

$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "There is no '$(PYTHON)'. Install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "'$(PYTHON)' is `$(PYTHON) -V 2>&1`; Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@
