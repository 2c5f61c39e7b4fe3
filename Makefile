# make run       fresh machine: environment, install, train Snake from pixels, a curve and a clip
# make test      what CI runs: lint, types, tests (under 10 minutes on 2 cores)
# make test-all  also the many-seed learning runs and long fault tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/first-snake

.PHONY: run test test-all lint clean

# torch first and by its exact version, so that every machine tests the same one. TORCH= (empty) lets pip choose what the
# range in pyproject.toml admits; point pip at torch's CPU index where a machine has no GPU.
TORCH ?= torch==2.13.0

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)")
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

run: $(VENV)/installed
	rm -rf $(RUN)
	$(BIN)/manyhands train snake --run-dir $(RUN)
	$(BIN)/manyhands eval $(RUN) --episodes 50
	$(BIN)/manyhands plot $(RUN) --out $(RUN)/curve.png
	$(BIN)/manyhands play $(RUN) --video $(RUN)/play.gif
	@echo "curve: $(RUN)/curve.png   clip: $(RUN)/play.gif"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# These take every core by themselves; the others are run two at a time.
TEAMS := tests/learning tests/topologies

test: lint
	$(BIN)/pytest -n 2 --dist worksteal $(addprefix --ignore=,$(TEAMS))
	$(BIN)/pytest $(TEAMS)

test-all: lint
	$(BIN)/pytest -m "slow or not slow"

clean:
	rm -rf $(VENV) build *.egg-info
