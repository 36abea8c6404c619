# Short names for what quickstart.py and the tools in .venv do.
#   make train ARGS='--num_rounds=20'

PYTHON ?= python3
ARGS ?=

.PHONY: train test docs setup lint format clean distclean

train:  ## set up, then one federated training run
	$(PYTHON) quickstart.py train $(ARGS)

test:  ## set up, then linters, type checker and tests
	$(PYTHON) quickstart.py test $(ARGS)

docs:  ## set up, then the site, every notebook executed, into docs/_build/html
	$(PYTHON) quickstart.py docs $(ARGS)

setup:  ## only set up .venv, with the development tools
	$(PYTHON) quickstart.py setup

lint: setup  ## linters and type checker
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports --no-logo --no-cache
	.venv/bin/zizmor --offline --no-progress --quiet --strict-collection .github

format: setup  ## formats the code
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

clean:  ## removes what tools leave behind; keeps .venv and runs/
	rm -rf build dist docs/_build docs/commands docs/reference docs/mechanisms/index.md *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## also removes the environment
	rm -rf .venv .uv
