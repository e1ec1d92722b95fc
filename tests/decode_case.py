"""What the tests of a decoded token's ops share: device, dtypes, and who can run Triton.

Without a GPU the kernels run in Triton's interpreter, in fp32.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (not GPU and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="no GPU, no interpreter",
)
