"""Judge the planner in simulated engines: ours beside the best fixed lengths, and another version.

    scripts/run.sh python benchmarks/planned_cells.py --save today.json
    scripts/run.sh python benchmarks/planned_cells.py --beside today.json

The engine's own scheduler (V2) and host step (V1) plan; the target, the drafter and their times are
simulated, along recorded texts of the demo pair and made-up requests. Nothing here was timed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def measure(name: str, seeds: int, with_fixed: bool) -> dict[str, list[float]]:
    """Run a cell: our rate with each seed, and that of the best fixed length."""
    from support.judged_cells import cells

    (cell,) = [one for one in cells() if one.name == name]
    found = {"ours": [float(cell.rate(seed, None)) for seed in range(seeds)], "fixed": []}
    if with_fixed or cell.is_mixed:
        best = [float(np.mean([cell.rate(seed, one) for seed in range(2)])) for one in cell.fixed]
        found["fixed"] = [max(best)]
    return found


def main() -> None:
    """Print a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="regular expression that a cell's name has")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fixed", action="store_true", help="the best fixed length of every cell")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--beside", type=Path, help="what another version has saved")
    parsed = parser.parse_args()
    from support.judged_cells import cells

    names = [cell.name for cell in cells() if re.search(parsed.only, cell.name)]
    before = json.loads(parsed.beside.read_text()) if parsed.beside else {}
    results, ratios = {}, []
    with ProcessPoolExecutor(parsed.processes) as pool:
        count = len(names)
        for name, found in zip(
            names,
            pool.map(measure, names, [parsed.seeds] * count, [parsed.fixed] * count),
            strict=True,
        ):
            results[name] = found
            rate = np.mean(found["ours"])
            line = f"{name:60} {rate:8.0f}"
            if found["fixed"]:
                line += f"  / best fixed {rate / found['fixed'][0]:.3f}"
            if name in before:
                ratios.append(rate / np.mean(before[name]["ours"]))
                line += f"  / before {ratios[-1]:.3f}"
            print(line, flush=True)
    if ratios:
        mean = float(np.exp(np.mean(np.log(ratios))))
        print(f"geometric mean {mean:.3f}, least {min(ratios):.3f}, most {max(ratios):.3f}")
    if parsed.save:
        parsed.save.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
