"""Report what `make mutants` found: caught and survived by file, for docs/engineering/faults.md.

    scripts/run.sh python tests/faults/mutants.py              # the table, and the survivors
    scripts/run.sh python tests/faults/mutants.py planning     # only files whose name contains this

`equivalent.toml` lists the mutants that make no visible difference, each with the reason.
They are identified by function and line, so they are found again after other changes.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

MUTANTS = Path("mutants")
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
CAUGHT = ("killed", "timeout", "segfault", "caught by type check")


@dataclass(frozen=True)
class Change:
    """An edit of one function: the lines removed and the lines added."""

    function: str
    old: str
    new: str


def function_of(mutant: str) -> str:
    """Return `package.module.Class.method` for mutmut's name of a mutant."""
    name = mutant.rpartition("__mutmut_")[0]
    module, _, mangled = name.rpartition(".")
    return f"{module}.{re.sub('^x_', '', mangled.removeprefix('xǁ').replace('ǁ', '.'))}"


def change_of(mutant: str, path: Path) -> Change:
    """Return the change that a mutant makes."""
    lines = get_diff_for_mutant(mutant, path=path).splitlines()[2:]

    def marked(sign: str) -> str:
        return "\n".join(line[1:].strip() for line in lines if line.startswith(sign))

    return Change(function_of(mutant), marked("-"), marked("+"))


def read_equivalent() -> set[Change]:
    """Read the changes that make no visible difference."""
    entries = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {Change(e["function"], e["old"].strip(), e["new"].strip()) for e in entries}


def files() -> Iterator[tuple[Path, dict[str, int | None]]]:
    """Yield every file with mutants, and mutmut's exit code for each mutant."""
    for meta in sorted(MUTANTS.rglob("*.py.meta")):
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        if codes:
            yield meta.relative_to(MUTANTS).with_suffix(""), codes


def main() -> None:
    """Print the report."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    equivalent = read_equivalent()
    survivors: list[tuple[str, Change]] = []
    total: Counter[str] = Counter()
    print("| file | mutants | caught | equivalent | survived | score |")
    print("|---|---:|---:|---:|---:|---:|")
    for path, codes in files():
        if wanted not in str(path):
            continue
        counts: Counter[str] = Counter()
        for mutant, code in codes.items():
            status = status_by_exit_code[code]
            if status in CAUGHT:
                counts["caught"] += 1
            elif status == "not checked":
                counts["unchecked"] += 1
            elif (change := change_of(mutant, path)) in equivalent:
                counts["equivalent"] += 1
            else:
                counts["survived"] += 1
                survivors.append((mutant, change))
        print(_row(str(path).removeprefix("vllm_dflash/"), counts))
        total += counts
    print(_row("**all**", total))
    if total["unchecked"]:
        print(f"\n{total['unchecked']} were not tried yet.")
    for mutant, change in survivors:
        print(f"\n{mutant}\n  - {change.old}\n  + {change.new}")


def _row(name: str, counts: Counter[str]) -> str:
    count = counts["caught"] + counts["equivalent"] + counts["survived"]
    real = max(1, count - counts["equivalent"])
    numbers = [count, counts["caught"], counts["equivalent"], counts["survived"]]
    return f"| {name} | {' | '.join(map(str, numbers))} | {100 * counts['caught'] / real:.1f}% |"


if __name__ == "__main__":
    main()
