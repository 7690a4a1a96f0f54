"""Print outcomes of scenarios on the CPU platform, in a process of its own: JSON, by name.

python -m support.cpu_outcomes NAME...; "asynchronous: " before a name schedules it that way.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

from support.interpreter import use_model_runner_v2


def main() -> None:
    use_model_runner_v2()
    from support.engines import engine, with_fixed_costs
    from support.interpreter import triton_attention
    from support.schedules import SCENARIOS, outcome_of

    found = {}
    for asked in sys.argv[1:]:
        scheduling, _, name = asked.rpartition(": ")
        scenario = SCENARIOS[name]
        attention = triton_attention() if scenario.has_trees else nullcontext()
        with with_fixed_costs(), attention, engine(scheduling, **scenario.settings) as llm:
            found[asked] = outcome_of(llm, scenario)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
