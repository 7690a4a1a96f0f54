"""Decides how much to draft in every step: Python, numpy and numba, without vLLM or torch.

V1's runner calls `planner.Planner`, V2's schedulers call `ahead.AheadPlanner`. Both combine which
drafts survive (`chances`), what a draft will be worth before it is made (`forecast`), what a step
costs (`costs`), and the search for the best plan (`search`; `places` on V2).
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]
