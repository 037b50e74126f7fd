# Every target makes .venv and installs what it needs by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.PHONY: demo test test-slow test-faults test-many test-load test-clients test-browser test-gpu lint audit serve bench frontier docs draft clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## Watch a real draft learn from its own traffic (up to 15 minutes on 2 cores)
	$(BIN)/adaptive-spec demo --output demo-output

test: $(STAMP)
	$(BIN)/pytest -m 'not slow and not gpu and not faults' -n 2 --dist worksteal

test-slow: $(STAMP)  ## The same promises on the real quickstart model
	$(BIN)/pytest -m slow

test-faults: $(STAMP)  ## What must not break the service, does not (docs/reliability.md), on SQLite and PostgreSQL
	$(BIN)/pytest tests/faults

test-many: $(STAMP)  ## Decoders and trainers on one PostgreSQL, killed and cut off; prints how fast the others follow
	$(BIN)/pytest tests/slow/test_many_processes.py -s

test-load: $(STAMP)  ## 200 streaming clients for three minutes, some vanish; then SIGTERM and SIGKILL under load (5 minutes)
	$(BIN)/pytest tests/slow/test_many_clients.py -s

test-clients: $(STAMP)  ## The API by its real clients: openai, curl, LiteLLM, schemathesis (about 10 minutes)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[clients]'
	$(BIN)/pytest tests/clients -s

test-browser: $(STAMP)  ## The dashboard in the machine's Chromium: axe-core, a phone's width, the keyboard
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/pytest tests/slow/test_dashboard_browser.py

test-gpu: $(STAMP)  ## What only a CUDA device can show (under 5 minutes); needs a torch built for it
	$(BIN)/pytest -m gpu -s

audit: $(STAMP)  ## Known vulnerabilities of the pinned versions (needs the network, so not part of `make test`)
	$(BIN)/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(SITE)

serve: $(STAMP)
	$(BIN)/adaptive-spec serve

bench: $(STAMP)  ## Our decoder and others' side by side (about 15 minutes on 2 cores); BENCH="--quick" for a first look
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/adaptive-spec bench --json bench.json --chart bench.png $(BENCH)

frontier: $(STAMP)  ## What relaxed verifiers gain for what they diverge; FRONTIER="--quick" for a first look
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,frontier]'
	$(BIN)/adaptive-spec frontier --json frontier.json --chart frontier.png $(FRONTIER)

docs: $(STAMP)  ## The documentation's site, in site/; a warning is an error
	$(BIN)/pytest tests/test_docs.py
	$(SITE)

draft: $(STAMP)  ## Rebuild the bundled quickstart draft (about 70 minutes on 2 cores)
	$(BIN)/adaptive-spec models cut-draft smollm2-135m build/draft \
		--recipe adaptive_spec/models/drafts/smollm2-135m/recipe.json

clean:
	rm -rf $(VENV) build dist
