# Two commands do everything on a fresh machine: `make demo` and `make test`. Both can be repeated.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip options, for example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU build of torch.
PIP_ARGS ?=
# Else each of the thousand processes that the tests start would compile rltop anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test unit soak bench lint fmt clean install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "rltop needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[train]" --group dev
	@touch $@

demo: install
	$(BIN)/rltop demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The linters beside the tests: mypy has one core to use, and the tests sometimes wait.
test: install
	@$(MAKE) --no-print-directory --jobs=2 lint unit

# Four workers for two cores, for tests wait too. A file stays on one worker: its runs are started once. conftest.py has
# the order.
unit: install
	$(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder

soak: install
	$(BIN)/pytest -q -m soak --timeout=3600 -rA

bench: install
	$(BIN)/python -m benchmarks

fmt: install
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
