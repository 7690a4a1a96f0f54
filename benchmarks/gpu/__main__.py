"""`python benchmarks/gpu`, or `python -m gpu` in benchmarks/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the package lies

from gpu.gpu_command import main

sys.exit(main())
