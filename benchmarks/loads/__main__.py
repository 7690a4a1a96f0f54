"""`python benchmarks/loads`, or `python -m loads` in benchmarks/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package lies

from loads.loads_command import main

sys.exit(main())
