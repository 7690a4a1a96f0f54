"""`python benchmarks/soak`, or `python -m soak` in benchmarks/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package lies

from soak.soak_command import main

main()
