"""How much to draft, decided every step: Python, numpy and numba, without vLLM or torch.

V1's runner talks to `planner.Planner`, V2's schedulers to `ahead.AheadPlanner`. They put together
which drafts survive (`chances`), what a draft will be worth before it is made (`forecast`), what a
step costs (`costs`), and the search for the best of it (`search`; `places` on V2).
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]
