# `make demo` and `make test` do all the set-up they need. On Linux, PyPI's torch is a CUDA build of gigabytes;
# `make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes a CPU build instead.
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= auto
# One thread per process: tests run in parallel processes, and torch's own threads would fight them.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: install demo test test-slow test-gpu lint notebooks bench clean
.DELETE_ON_ERROR:

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -e '.[dev]'
	touch $@

install: $(VENV)/.dev  ## .venv with everything the tests need

demo: $(VENV)/.runtime  ## the quick ablation on the CPU: table on the screen, figures under runs/demo
	$(BIN)/prism demo --out runs/demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The kernels run in Triton's interpreter in a process of their own: the switch is read when triton is imported.
test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not interpreter"
	$(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) -m "interpreter and not slow" tests/prism

test-slow: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m "slow and not interpreter"
	$(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) -m "slow and interpreter" tests/prism

test-gpu: $(VENV)/.dev  ## where there is a CUDA GPU; the time goes into compiling kernels, so many workers help
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m gpu

notebooks: $(VENV)/.dev  ## run the notebooks from top to bottom and keep their outputs
	$(ONE_THREAD) $(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

bench: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/prism bench

clean:
	rm -rf $(VENV) build dist *.egg-info
