"""What the host reads of a device without holding it up."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np


class HostCopy:
    """A tensor on its way to the host: as it is when this is made, whatever is launched behind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = async_copy_to_np(tensor)
        self._arrival = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def wait(self) -> np.ndarray:
        """Its values, once all that was launched before is done."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values
