"""Decides how much to draft in every step: Python and numpy, without vLLM or torch.

V1's runner and V2's scheduler call `planner.Planner`. It weighs how many drafts are expected to be
accepted (`acceptance`) against what a step costs (`costs`), and finds the best one (`search`).
`step` has the records that go in and out, `texts` finds drafts in a request's own text.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Bools = npt.NDArray[np.bool_]
