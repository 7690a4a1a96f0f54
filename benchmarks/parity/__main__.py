"""`python benchmarks/parity`, or `python -m parity` in benchmarks/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package lies

from parity.parity_command import main

sys.exit(main())
