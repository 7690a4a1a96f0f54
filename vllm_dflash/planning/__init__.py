"""How much to draft, decided every step: pure Python and numpy, without vLLM or torch.

`planner.Planner` is what a runner talks to. It puts together estimates of which drafts survive
(`survival`), of what a draft will be worth before it is made (`forecast`), of what a step costs
(`costs`), and the selection of what to verify (`candidates`).
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]
