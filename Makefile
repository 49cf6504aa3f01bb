# Every target sets up what it needs. `make factory` is the main job; `make check test` is what CI runs.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2
BUILD ?= build
WHEEL_SITE = $(BUILD)/wheel-site
DATA ?= runtime/kf_runtime/data

.PHONY: setup factory test check wheel verify report bench clean
.PHONY: sm-build sm-prove sm-bundle rebuild join wheel-test device-check

# Another BIN is an environment that is taken as it is: nothing is ever installed into it.
setup: $(if $(filter .venv/bin,$(BIN)),.venv/.stamp)

# One pip call, so that the pinned torch decides and no second torch is fetched.
.venv/.stamp: pyproject.toml runtime/pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install -q torch==2.13.0 -e runtime -e '.[dev]'
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
	rm -rf $(BUILD)/wheel $(BUILD)/wheel-src $(WHEEL_SITE)
	mkdir -p $(BUILD) && cp -r runtime $(BUILD)/wheel-src && cd $(BUILD)/wheel-src && rm -rf build *.egg-info kf_runtime/data
	cp -r $(DATA) $(BUILD)/wheel-src/kf_runtime/data
	$(BIN)/python -m build -q --wheel --no-isolation --outdir $(BUILD)/wheel $(BUILD)/wheel-src
	$(BIN)/python -m pip install -q --no-deps --target $(WHEEL_SITE) $(BUILD)/wheel/kf_runtime-*.whl
	ls -l $(BUILD)/wheel

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
	$(BIN)/python tools/bench/pytorch.py

# One SM at a time, for CI (docs/ci.md). CELLS narrows every target to the cells whose keys hold that text.
SMS ?= sm_80 sm_89 sm_90a sm_100a sm_103a sm_120a
KF := $(BIN)/python -m kernel_factory.cli
CELL_OPTION = $(if $(CELLS),--cell '$(CELLS)')
ONE_SM = --sm $(or $(SM),$(error SM: expected one of $(SMS); found nothing)) $(CELL_OPTION)
ALL_SMS = $(SMS:%=--sm %) $(CELL_OPTION)

sm-build: setup
	$(KF) build $(ONE_SM) -j $(JOBS)

# Judged in a copy: a proof's figures may differ with CPU and thread count, so the committed digest is no test of it.
sm-prove: JUDGED = $(BUILD)/judged/$(SM)
sm-prove: setup
	$(KF) validate $(ONE_SM) -j $(JOBS)
	rm -rf $(JUDGED) && mkdir -p $(BUILD)/judged && cp -r allowlists $(JUDGED)
	KF_ALLOWLISTS=$(JUDGED) $(KF) admit $(ONE_SM)

sm-bundle: setup
	$(BIN)/python tools/bundle.py pack $(ONE_SM) --out $(BUILD)/bundles

# The commit in another folder, from nothing: every cubin and PTX must be the bundle's.
rebuild: SECOND = $(abspath $(BUILD))/rebuild/$(SM)
rebuild: IN_SECOND = cd $(SECOND) && KF_STORE=$(SECOND)/.store PYTHONPATH=$(SECOND):$(SECOND)/runtime $(abspath $(BIN))/python
rebuild: setup
	rm -rf $(SECOND)
	git clone -q . $(SECOND)
	$(IN_SECOND) -m kernel_factory.cli build $(ONE_SM) -j $(JOBS)
	$(IN_SECOND) tools/bundle.py compare $(ONE_SM) $(abspath $(BUILD))/bundles/$(SM).tar

# The wheel of all bundles: exactly the admitted cells, or none.
join: setup
	rm -rf $(BUILD)/join
	KF_STORE=$(BUILD)/join/store KF_DATA=$(BUILD)/join/data $(BIN)/python tools/bundle.py join $(ALL_SMS) $(BUILD)/bundles
	$(MAKE) wheel DATA=$(BUILD)/join/data

# The wheel with torch alone, away from the checkout. CLEAN names the environment, made where there is none.
CLEAN ?= $(BUILD)/clean

wheel-test:
	@ls $(BUILD)/wheel/kf_runtime-*.whl >/dev/null 2>&1 || { echo "wheel-test: expected a wheel in $(BUILD)/wheel; run 'make join'"; exit 1; }
	test -x $(CLEAN)/bin/python || $(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/python -I -m pip install -q torch==2.13.0 $(BUILD)/wheel/kf_runtime-*.whl
	$(CLEAN)/bin/python -I -m pip install -q --no-deps --force-reinstall $(BUILD)/wheel/kf_runtime-*.whl
	$(CLEAN)/bin/python -I tools/wheel_test.py allowlists $(ALL_SMS)

# On a machine with a GPU; DEVICE_OPTIONS="--emulated sm_90a --no-timing" runs it on the emulated driver instead.
device-check: setup
	KF_WHEEL_SITE=$(WHEEL_SITE) KF_WHEEL=$(BUILD)/wheel PYTHON=$(BIN)/python tools/device_check.sh $(BUILD)/device $(DEVICE_OPTIONS)

clean:
	rm -rf build .store
