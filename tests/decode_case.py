"""What the tests of a decoded token's ops share: device, dtypes, and who can run Triton.

Without a GPU the kernels run in Triton's interpreter, in fp32.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ltconvert.kernels import dispatch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (not GPU and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="no GPU, no interpreter",
)


@contextmanager
def attention_by(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention of that backend; in the interpreter blocks so small that keys come in parts."""
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(backend))
    if backend != "triton":
        yield
        return
    from ltconvert.kernels.decode_attention import triton

    if not GPU:
        monkeypatch.setattr(triton, "TILE", 256)
        monkeypatch.setattr(triton, "KEYS", 16)
    triton._plan.cache_clear()
    yield
    triton._plan.cache_clear()
