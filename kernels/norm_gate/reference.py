"""``norm_gate`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def norm_gate(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, gate_fn: str) -> Tensor:
    """See ``ltconvert.kernels.norm_gate.norm_gate``."""
    work = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(work), x.shape[-1:], None, eps) * weight.to(work)
    gate = gate.to(work)
    if gate_fn == "silu":
        opened = F.silu(gate)
    else:
        opened = torch.sigmoid(gate) * (2.0 if gate_fn == "2sigmoid" else 1.0)
    return (normed * opened).to(x.dtype)
