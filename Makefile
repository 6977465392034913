# `make demo` and `make test` do all their own set-up on a bare Debian 12 or 13 as root.
# As another user, or elsewhere, they use local processes instead of Slurm and say so.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test check clean

setup: $(VENV)/.ready

# torch first and pinned: nothing that depends on it may choose another build.
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "python3-venv is missing; installing it"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv && \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/slurm-pt demo

test: setup check
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
