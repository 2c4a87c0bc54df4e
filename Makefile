# Both commands need nothing but Python >= 3.11; the first of them makes .venv and installs.
#   make compare   GPT+, nGPT and anGPT, and anGPT with Muon, side by side on this machine, and a page that shows it
#   make test      style, types and behaviour
# Further tests, which need nothing else: make test-slow (several processes, faults, compiled code). Those that take tens
# of minutes or need a corpus, benchmarks, SLURM or a quiet machine, and are skipped without: make test-long. Kills,
# full disks, permissions, damaged files and bad inputs, hundreds of each: make torture.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: compare test test-slow test-long torture lint format docs docs-site audit clean

compare: $(INSTALLED)
	$(BIN)/angpt compare --preset laptop --out studies/compare --architectures gpt+ ngpt angpt angpt:muon \
		--budgets 200k 400k --baseline-budgets 800k --seeds 0 1 2 --record-moments

test: lint
	$(BIN)/pytest -n auto -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/pytest -m "slow and not long and not torture"

test-long: $(INSTALLED)
	$(BIN)/pytest -m long

# The fault suite. FORM=short takes minutes, as in continuous integration.
FORM ?= long
torture: $(INSTALLED)
	ANGPT_TORTURE=$(FORM) $(BIN)/pytest -n auto --dist loadfile tests/torture

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Regenerates what the documentation takes from the code.
docs: $(INSTALLED)
	$(BIN)/python -m angpt.models.table1
	$(BIN)/angpt factors --size 0.5B --figure docs/figures/concentration.png
	$(BIN)/python -m angpt.bench.footprint
	$(BIN)/python -m angpt.analysis.toy docs/figures
	$(BIN)/python .ci/dependencies.py
	$(BIN)/python .ci/results.py
	$(BIN)/python -m experiments.evidence pages

# The documentation as a site, in site/; a broken link is an error.
docs-site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Known vulnerabilities of the versions in constraints.txt, by a tool with an environment of its own; needs PyPI.
audit:
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "angpt needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
