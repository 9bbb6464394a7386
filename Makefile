# Eyas: `make help` lists what there is. Every target that needs the environment makes it first (a moment if it is there).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PROFILE ?= smoke
# the engine that was chosen last, so that a GPU machine needs to be told once
ENGINE ?= $(or $(file < .venv/engine),cpu)
REV ?= HEAD
UV_VERSION := 0.13.9
PYTHON ?=
WHICH := $(if $(filter file,$(origin PROFILE)),,report@$(PROFILE))

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export UV_HTTP_TIMEOUT ?= 180

.PHONY: help setup doctor test lint lint-pipeline repro status metrics diff compare serve plots remote push pull fetch fsck gc adopt commit clean lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	printf '\nVariables: PROFILE=%s (of params.yaml), ENGINE=%s (cpu or cuda), REV=%s (for diff and compare)\n' '$(PROFILE)' '$(ENGINE)' '$(REV)'

# A venv with uv in it, of the first Python 3.11 or 3.12 that really runs (a pyenv shim may not) and can make one.
define venv
	if ! .venv/bin/python -c '' 2>/dev/null || [[ "$$(.venv/bin/uv --version 2>/dev/null)" != "uv $(UV_VERSION)"* ]]; then
	  found=""
	  for name in $(or $(PYTHON),python3.11 python3.12 python3 python); do
	    path="$$(PATH="$${PATH#*:}" command -v "$$name" || true)"
	    if [ -n "$$path" ] && "$$path" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
	      found="$$path"
	      break
	    fi
	  done
	  if [ -z "$$found" ]; then
	    echo "error: no Python 3.11 or 3.12 with its venv module (tried: $(or $(PYTHON),python3.11 python3.12 python3 python));" \
	      "install one (Debian and Ubuntu: apt-get install python3-venv) or name it: make setup PYTHON=/path/to/python3.12" >&2
	    exit 1
	  fi
	  echo "making .venv with $$("$$found" --version)"
	  rm -rf .venv
	  "$$found" -m venv .venv
	  .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"
	fi
endef

setup: ## make .venv from locks/$(ENGINE).txt and fetch the pinned packages with prompts and target
	@if [ ! -f locks/$(ENGINE).txt ]; then echo "error: ENGINE=$(ENGINE) must be cpu or cuda" >&2; exit 1; fi
	key="$(ENGINE) $$(cat locks/$(ENGINE).txt locks/data.txt pyproject.toml | sha256sum)"
	if [ "$$(cat .venv/installed 2>/dev/null)" = "$$key" ]; then exit 0; fi
	mkdir -p .work
	exec 9>.work/setup.lock
	flock 9
	if [ -e .venv/installing ]; then echo "the last setup was cut short; starting afresh"; rm -rf .venv; fi
	$(venv)
	rm -f .venv/installed
	touch .venv/installing
	unset PYTHONDONTWRITEBYTECODE
	# uv reads its own settings only; a wheel folder that pip was told of serves both
	links="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-$$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)}}"
	backend=""
	if [ -n "$$links" ]; then export UV_FIND_LINKS="$${links// /,}"
	elif [ "$(ENGINE)" = cpu ]; then backend="--torch-backend cpu"; fi
	echo "installing locks/$(ENGINE).txt: a minute or two, with a cold cache as long as a gigabyte takes to download"
	# imports from source make an engine start take two minutes in place of half a minute, hence the bytecode
	.venv/bin/uv pip sync --quiet --python .venv/bin/python --compile-bytecode $$backend locks/$(ENGINE).txt
	.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
	rm .venv/installing
	echo $(ENGINE) > .venv/engine
	eyas packages fetch
	eyas cache setup
	eyas doctor
	echo "$$key" > .venv/installed

doctor: setup ## check Python, engine, versions, links, disk, memory, processor
	@eyas doctor

test: setup ## run all tests, the small pipeline included
	@pytest

lint: setup ## ruff and mypy
	@ruff check .
	ruff format --check .
	mypy

lint-pipeline: setup ## compare the deps in dvc.yaml with what the stages really import
	@pytest tests/unit/test_pipeline.py

repro: setup ## build what is out of date: PROFILE if given, else all that are active; bring what the remote has; then a summary
	@python -m eyas.moving repro $(if $(WHICH),$(PROFILE))

status: setup ## say which stages are out of date, and why
	@dvc status $(if $(WHICH),--with-deps $(WHICH))

metrics: setup ## show the metrics of all active profiles
	@dvc metrics show

diff: setup ## compare metrics with those of another commit (REV)
	@dvc metrics diff $(REV)

compare: setup ## say what is better or worse than in another run (REV: commit, branch, REV:profile or a metrics folder); GATE=1: fail if the head is worse
	@eyas compare "$(REV)" workspace$(if $(filter file,$(origin PROFILE)),,:$(PROFILE)) $(if $(GATE),--gate)

serve: setup ## serve PROFILE's target with its head, by vLLM at http://127.0.0.1:8000 (PORT=…); then `eyas demo --profile PROFILE` elsewhere
	@exec eyas serve --profile $(PROFILE) $(if $(PORT),--port $(PORT))

plots: setup ## draw the plot series as one page
	@dvc plots show --out .work/plots

remote: setup ## make URL this checkout's remote: /a/folder, ssh://host/path or s3://bucket/path (ENDPOINT=https://… for other S3 servers)
	@if [ -z "$(URL)" ]; then echo "error: which? make remote URL=/a/folder, ssh://host/path or s3://bucket/path" >&2; exit 1; fi
	python -m eyas.moving set "$(URL)" $(if $(ENDPOINT),--endpoint "$(ENDPOINT)") $(if $(JOBS),--jobs "$(JOBS)")

push: setup ## send PROFILE's outputs to the remote and check them there; RUNS=1: those of earlier runs too; VIA=rclone, BWLIMIT=200M
	@python -m eyas.moving push $(PROFILE) $(if $(RUNS),--runs) $(if $(VIA),--via "$(VIA)") $(if $(BWLIMIT),--bwlimit "$(BWLIMIT)")

pull: setup ## bring PROFILE's outputs from the remote into the checkout
	@$(if $(filter file,$(origin PROFILE)),,eyas activate $(PROFILE))
	python -m eyas.moving pull $(PROFILE) $(if $(RUNS),--runs) $(if $(VIA),--via "$(VIA)") $(if $(BWLIMIT),--bwlimit "$(BWLIMIT)")

fetch: setup ## bring PROFILE's outputs from the remote into DVC's cache only
	@$(if $(filter file,$(origin PROFILE)),,eyas activate $(PROFILE))
	python -m eyas.moving fetch $(PROFILE) $(if $(RUNS),--runs) $(if $(VIA),--via "$(VIA)") $(if $(BWLIMIT),--bwlimit "$(BWLIMIT)")

fsck: setup ## compare DVC's cache, metrics and stores with their checksums; damage goes to quarantine and is fetched again; DRY=1: report only
	@eyas cache fsck $(if $(DRY),--dry-run)

gc: setup ## show objects that no commit, profile or run needs; YES=1 removes them; ONLY_HEAD=1: keep only what dvc.lock names now and in HEAD
	@eyas cache gc $(if $(YES),--yes) $(if $(ONLY_HEAD),--only-head)

adopt: setup ## record PROFILE's stages that finished when DVC was killed before it had hashed their outputs
	@eyas cache adopt $(PROFILE)

# the message goes through the environment: it may hold quotes
commit: export EYAS_MESSAGE = $(M)
commit: setup ## commit PROFILE's lock entries, metrics and parameters as M="…", if they are up to date and sound
	@eyas cache commit $(PROFILE) --message "$$EYAS_MESSAGE"

clean: ## remove PROFILE's scratch and temporary files; outputs, metrics and the DVC cache stay
	@if [[ ! "$(PROFILE)" =~ ^[A-Za-z0-9][A-Za-z0-9_-]*$$ ]]; then echo "error: PROFILE=$(PROFILE) is no profile's name" >&2; exit 1; fi
	for lock in .work/$(PROFILE)/*.lock; do
	  if [ -e "$$lock" ] && ! flock --nonblock "$$lock" true; then
	    echo "error: $$(basename "$$lock" .lock)@$(PROFILE) is running (pid $$(cat "$$lock")); stop it first" >&2
	    exit 1
	  fi
	done
	rm -rf .work/$(PROFILE)
	for folder in data/$(PROFILE) metrics/$(PROFILE); do
	  if [ -d "$$folder" ]; then find "$$folder" -name '.*.tmp' -prune -exec rm -rf {} +; fi
	done

lock: ## resolve locks/cpu.txt, locks/cuda.txt and locks/env.json anew, keeping pins that still fit
	@$(venv)
	unset UV_FIND_LINKS UV_TORCH_BACKEND
	mkdir -p .work/lock
	for engine in cpu cuda; do
	  overrides=""
	  if [ "$$engine" = cpu ]; then overrides="--override locks/overrides.txt"; fi
	  if [ -f locks/$$engine.txt ]; then cp locks/$$engine.txt .work/lock/$$engine.txt; fi
	  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	    --extra $$engine --extra dev $$overrides --output-file .work/lock/$$engine.txt pyproject.toml
	done
	PYTHONPATH=src .venv/bin/python -m eyas.environment .work/lock
