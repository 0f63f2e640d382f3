# Commands that do all of their own set-up: `make reproduce` (the main job), `make test` (the suite), `make test-long` (tests that take
# minutes each), `make test-vllm` (the vLLM plugin), `make test-ray` (replicas), `make lint`, and `make sanitize`.
# They need Python 3.11 or newer with pip, and nothing else.

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
VENV_RAY := .venv-ray
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: reproduce test test-long test-gpu test-vllm venv-vllm test-ray venv-ray lint sanitize clean

reproduce: $(VENV)/.core
	$(VENV)/bin/twoscale reproduce --preset tiny --with-bundled --effort short $(ARGS)

# Three files of tests at a time, because some wait for servers, browsers and disks; threads that wait sleep, so that they do not get in each
# other's way.
test: $(VENV)/.test
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# What trains the preset `tiny`, or takes minutes for another reason; CI runs it after `make test`.
test-long: $(VENV)/.test
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -m long $(ARGS)

# The vLLM plugin, in an environment of its own. Where vLLM cannot be installed the tests are skipped.
test-vllm:
	@if $(MAKE) --no-print-directory venv-vllm; then \
	    $(VENV_VLLM)/bin/python -m pytest tests/test_vllm.py -rs $(ARGS); \
	else echo "vLLM could not be installed here: the tests of its plugin are skipped"; fi

venv-vllm: $(VENV_VLLM)/.vllm

# Replicas with Ray Serve, in an environment of its own. Where Ray cannot be installed the tests are skipped.
test-ray:
	@if $(MAKE) --no-print-directory venv-ray; then \
	    OMP_WAIT_POLICY=PASSIVE $(VENV_RAY)/bin/python -m pytest tests/test_ray.py -rs $(ARGS); \
	else echo "Ray could not be installed here: the tests of its replicas are skipped"; fi

venv-ray: $(VENV_RAY)/.ray

# Device tests on a GPU; where there is none they are skipped and say so.
test-gpu: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m cuda -rs $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

# The engine's and the server's tests with kernels built for AddressSanitizer and UndefinedBehaviorSanitizer (gcc). Python itself is not
# instrumented, so libasan is loaded before it (and libstdc++, whose exceptions it watches). PYTHONMALLOC=malloc guards ctypes' arrays too.
SANITIZED := $(addprefix tests/test_,$(addsuffix .py,sanitize memory weights sample threads engine kv_dtype fused_loop single generate request device exits serve written_pages fair http_api under_load))
sanitize: $(VENV)/.test
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TWOSCALE_SANITIZE=1 PYTHONMALLOC=malloc OMP_WAIT_POLICY=PASSIVE \
	$(VENV)/bin/python -m pytest $(SANITIZED) $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("twoscale needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# The constraints pin every version that was tested; torch above all, whose open range pulls gigabytes of CUDA packages. What is imported is
# compiled to bytecode then; compiling all of every package would take half of the time of an installation.
$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	touch $@ $(VENV)/.core

$(VENV_VLLM)/.vllm: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --requirement requirements-vllm.txt
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --no-build-isolation --editable .
	touch $@

$(VENV_RAY)/.ray: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_RAY)
	$(VENV_RAY)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt \
	    --editable '.[ray]' pytest pytest-timeout httpx
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_RAY)
