"""`vllm-dflash inspect` on faked CUDA devices, one line of JSON for each.

python -m support.inspect_child '[{"capability": "9.0", "drafter": "...", "target": "...", ...}]'
"""

from __future__ import annotations

import json
import os
import sys

from support.faked_cuda import fake_cuda


def main() -> None:
    """A process is forked for each case, since vLLM asks once for a device and remembers."""
    platform = fake_cuda()
    for case in json.loads(sys.argv[1]):
        if os.fork():
            assert os.wait()[1] == 0
            continue
        platform.capability = tuple(int(part) for part in case["capability"].split("."))
        from vllm.model_executor.models import registry

        from support.inspected import inspect
        from vllm_dflash.tools.inspect.inspect_report import make_tables
        from vllm_dflash.tools.inspect.target import EngineOptions

        # vLLM reads what a model class can do in a process of its own, to leave CUDA alone.
        registry._run_in_subprocess = lambda read: read()
        found = inspect(case["drafter"], case["target"], EngineOptions(**case["options"]))
        screens = [table.plain() for table in make_tables(found)]
        print(json.dumps({**found.to_dict(), "screens": screens}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
