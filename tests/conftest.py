"""Settings and marks of all tests, and the model runner they run on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before vLLM is imported: engines run in the test process, small caches, no telemetry.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# The same examples every time, without a deadline: times depend on how busy the machine is.
# `make fuzz` runs new ones, twenty times as many. What it finds fails again in its next run, and
# becomes an @example of its test. Tests that want more or fewer multiply the profile's number.
settings.register_profile(
    "tests",
    settings.get_profile("default"),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    settings.get_profile("tests"),
    max_examples=20 * settings.get_profile("tests").max_examples,
    derandomize=False,
    database=settings.get_profile("default").database,
    print_blob=True,
)
settings.load_profile("tests")

RUNNERS = ("v1", "v2")
TESTS = Path(__file__).parent
NO_DEVICE = pytest.StashKey[str]()
"""Reason why there is no emulated device."""
MARKED = ("engine", "server", "cluster", "emulated")
"""Folders whose tests are marked with the folder's name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--runner",
        choices=RUNNERS,
        default="v1",
        help="v1: all tests, those of both runners on V1. v2: the latter on Model Runner V2, which"
        " on a CPU needs Triton's interpreter and so a process of its own.",
    )
    parser.addoption(
        "--emulated",
        action="store_true",
        help="tests/emulated, and tests marked `cuda`, on a GPU that is emulated in this process",
    )
    parser.addoption(
        "--slow", action="store_true", help="also those that a pull request does without"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--runner") == "v2":
        from support.interpreter import use_model_runner_v2

        use_model_runner_v2()
    if config.getoption("--emulated"):
        from emulated import build, vllm_side

        if (reason := build.why_not()) is not None:
            config.stash[NO_DEVICE] = reason
        else:
            vllm_side.use()


@pytest.fixture(params=RUNNERS, scope="session")
def runner(request: pytest.FixtureRequest) -> str:
    """Model runner of this process; a test that uses this fixture tests both."""
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if (folder := item.path.relative_to(TESTS).parts[0]) in MARKED:
            item.add_marker(folder)

    chosen = config.getoption("--runner")
    on_emulated = config.getoption("--emulated")
    if (reason := config.stash.get(NO_DEVICE, None)) is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))

    def is_for_emulated(item: pytest.Item) -> bool:
        return item.get_closest_marker("emulated") is not None

    def runner_of(item: pytest.Item) -> str:
        if item.get_closest_marker("v2") is not None:
            return "v2"
        callspec = getattr(item, "callspec", None)
        return callspec.params.get("runner", "v1") if callspec else "v1"

    def is_chosen(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow") is not None and not config.getoption("--slow"):
            return False
        if on_emulated:
            is_of_v2 = runner_of(item) == "v2"
            marks = ("emulated", "cuda", *(["also_emulated"] if is_of_v2 else []))
            return any(item.get_closest_marker(mark) is not None for mark in marks)
        return runner_of(item) == chosen and not is_for_emulated(item)

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restore vLLM's log level: commands in the test process lower it, also for later children."""
    names = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
