"""Check what a release of vLLM breaks. Its sources are fetched and parsed, and never run.

    make seams VLLM=0.33.0               # names what is missing, or differs from the record
    make seams VLLM=0.33.0 ARGS=--record # writes vllm_dflash/seams/0.33.0.json

Fails if something is missing or has another signature. A changed body is for a person to read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from packaging.version import Version  # noqa: E402

from support.seam_record import RECORDS, entries, examine  # noqa: E402
from support.vllm_sources import Sources  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-dflash"
FETCH = """
import hashlib, sys
from pip._internal.commands import create_command
command = create_command("download")
options, _ = command.parse_args([])
session = command._build_session(options)
found = command._build_package_finder(options, session).find_all_candidates("vllm")
links = [one.link for one in found if str(one.version) == sys.argv[1] and not one.link.is_wheel]
if not links:
    sys.exit(f"pip's index has no sources of vLLM {sys.argv[1]}")
answer = session.get(links[0].url_without_fragment)
answer.raise_for_status()
if links[0].hash and hashlib.new(links[0].hash_name, answer.content).hexdigest() != links[0].hash:
    sys.exit("what was downloaded has another hash than the index says")
open(sys.argv[2], "wb").write(answer.content)
"""
"""Runs with the pip outside .venv: `pip download` with its settings, without running the build."""


def fetched(version: str) -> Path:
    """Return the folder with vLLM's Python files. Download it if it is not there."""
    folder = CACHE / f"vllm-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        archive = CACHE / f"vllm-{version}.tar.gz"
        base = getattr(sys, "_base_executable", sys.executable)
        if code := subprocess.run([base, "-c", FETCH, version, str(archive)]).returncode:
            sys.exit(code)
        with tarfile.open(archive) as tar:
            top = f"vllm-{version}/vllm/"
            files = (one for one in tar if one.name.startswith(top) and one.name.endswith(".py"))
            tar.extractall(CACHE / "unpacked", files, filter="data")
        (CACHE / "unpacked" / folder.name).rename(folder)
        archive.unlink()
    return folder


def main() -> int:
    """Print a line for each finding."""
    parser = argparse.ArgumentParser(description="Check the seams of vllm-dflash with a vLLM.")
    parser.add_argument("version", help="of vLLM, as 0.33.0")
    parser.add_argument(
        "--record", action="store_true", help="write vllm_dflash/seams/VERSION.json"
    )
    asked = parser.parse_args()
    record, findings = examine(Sources(fetched(asked.version)))
    now, is_broken = entries(record), bool(findings)
    versions = [Version(file.stem) for file in RECORDS.glob("*.json")]
    if earlier := [one for one in versions if one <= Version(asked.version)]:
        before = entries(json.loads((RECORDS / f"{max(earlier)}.json").read_text()))
        for path in sorted(now.keys() & before.keys()):
            takes, took = (one[path].get("parameters") for one in (now, before))
            if takes != took:
                is_broken = True
                findings.append(f"signature  {path}({takes}), and in {max(earlier)} ({took})")
            elif now[path] != before[path]:
                findings.append(f"body       {path}, not as in {max(earlier)}")
    print("".join(f"{one}\n" for one in findings), end="")
    num_names = sum(map(len, record["names"].values()))
    print(f"{len(now)} seams and {num_names} imports of vLLM {asked.version} found")
    if asked.record:
        (RECORDS / f"{asked.version}.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
