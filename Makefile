# Every target sets up what it needs. `make factory` is the main job; `make check test` is what CI runs.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2
WHEEL_SITE := build/wheel-site

.PHONY: setup factory test check wheel verify report bench clean

setup: .venv/.stamp

# One pip call, so that the pinned torch decides and no second torch is fetched.
.venv/.stamp: pyproject.toml runtime/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q torch==2.13.0 -e runtime -e '.[dev]'
	touch $@

factory: setup
	$(BIN)/kf build -j $(JOBS)
	$(BIN)/kf validate -j $(JOBS)
	$(BIN)/kf admit
	$(BIN)/kf package
	$(BIN)/kf report
	$(MAKE) wheel
	$(BIN)/python tools/wheel_demo.py $(WHEEL_SITE)

# The wheel, and a copy of it installed where nothing of the checkout is in reach.
wheel: setup
	rm -rf build/wheel build/wheel-src $(WHEEL_SITE)
	mkdir -p build && cp -r runtime build/wheel-src && rm -rf build/wheel-src/build build/wheel-src/*.egg-info
	$(BIN)/python -m build -q --wheel --no-isolation --outdir build/wheel build/wheel-src
	$(BIN)/python -m pip install -q --no-deps --target $(WHEEL_SITE) build/wheel/kf_runtime-*.whl
	ls -l build/wheel

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/python -m pytest tests

verify: setup
	$(BIN)/kf verify -j $(JOBS)

report: setup
	$(BIN)/kf report

bench: setup
	$(BIN)/python tools/bench/run.py
	$(BIN)/python tools/bench/emulator_speed.py

clean:
	rm -rf build .store
