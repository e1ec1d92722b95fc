"""Rotary position embeddings: cos and sin tables from a RoPE parameter dict.

Shapes: B batch, H heads, T tokens, D head_dim, F = D / 2 frequencies.
The frequencies come from transformers' own ``ROPE_INIT_FUNCTIONS`` where they define the type
(llama3, linear, yarn); ``default`` left that table in transformers 5 and is computed here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ltconvert.errors import UserError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_NEEDED_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def check_rope(params: dict[str, Any], head_dim: int) -> None:
    """Raise UserError, in one line, for RoPE parameters that ltconvert does not compute."""
    rope_type = params.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UserError(
            f"RoPE type {rope_type!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    missing = [k for k in ("rope_theta", *_NEEDED_KEYS[rope_type]) if params.get(k) is None]
    if missing:
        raise UserError(f"RoPE type {rope_type!r} needs {', '.join(missing)} in rope_parameters")
    partial = params.get("partial_rotary_factor")
    if partial is not None and partial != 1.0:
        raise UserError(
            f"partial_rotary_factor {partial} is not supported: only 1.0 (all of head_dim rotates)"
        )
    if head_dim % 2:
        raise UserError(f"RoPE needs an even head_dim, got {head_dim}")


class Rope:
    """Makes cos and sin tables for one set of RoPE parameters.

    No ``nn.Module`` on purpose: ``model.to(bf16)`` must not cast the frequencies, building on the
    meta device must not lose them and ``state_dict`` must not hold them. They are computed on
    first use, on the CPU in fp32, and kept for each device.

    Args:
        params: one RoPE dict in the form of transformers' ``rope_parameters`` (``rope_type``,
            ``rope_theta`` and the keys of that type, all present).
        head_dim: D.

    Raises:
        UserError: the type or a key is not supported.
    """

    def __init__(self, params: dict[str, Any], head_dim: int) -> None:
        check_rope(params, head_dim)
        self.params = dict(params)
        self.head_dim = head_dim
        self._by_device: dict[torch.device, Tensor] = {}
        self._scaling = 1.0

    def frequencies(self, device: torch.device | str) -> tuple[Tensor, float]:
        """``(inv_freq_D fp32 on device, scaling)``, the same for both halves of a head.

        The scaling multiplies cos and sin (YaRN).
        """
        device = torch.device(device)
        if device not in self._by_device:
            # A tensor made in inference mode or under a meta device would outlive its context.
            with torch.inference_mode(False), torch.device("cpu"):
                inv_freq_F, self._scaling = _inverse_frequencies(self.params, self.head_dim)
                self._by_device[device] = inv_freq_F.repeat(2).to(device)
        return self._by_device[device], self._scaling

    def __call__(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos_BTD, sin_BTD)`` fp32 on the device of the integer positions."""
        inv_freq_D, scaling = self.frequencies(positions_BT.device)
        # A product, not a matmul: autocast would run that in half precision. Three launches, which
        # count in a step of decoding, and two more with a scaling.
        angles_BTD = positions_BT[..., None] * inv_freq_D
        cos_BTD, sin_BTD = angles_BTD.cos(), angles_BTD.sin()
        return (cos_BTD, sin_BTD) if scaling == 1.0 else (cos_BTD * scaling, sin_BTD * scaling)


def rope_tables(
    params: dict[str, Any], head_dim: int, positions_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """``(cos_BTD, sin_BTD)`` fp32 of one RoPE dict: the one-off form of ``Rope``."""
    return Rope(params, head_dim)(positions_BT)


def apply_rope(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotate queries or keys (the first half of D pairs with the second); the dtype stays."""
    cos_B1TD, sin_B1TD = cos_BTD[:, None].to(x_BHTD.dtype), sin_BTD[:, None].to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_B1TD + torch.cat((-second, first), dim=-1) * sin_B1TD


def _inverse_frequencies(params: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """``(inv_freq_F fp32, scaling)`` on the current default device."""
    rope_type = params.get("rope_type", "default")
    if rope_type == "default":
        exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (params["rope_theta"] ** exponents_F), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # All that those functions read of a config; the standardising was done by the spec's reader.
    config = SimpleNamespace(
        rope_parameters=dict(params),
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=params.get("original_max_position_embeddings"),
        standardize_rope_params=lambda: None,
    )
    inv_freq_F, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")
    return inv_freq_F.float(), float(scaling)


def rotated(
    q_BHTD: Tensor, k_BGTD: Tensor, tables: dict[str, tuple[Tensor, Tensor]], name: str | None
) -> tuple[Tensor, Tensor]:
    """Queries and keys at their positions; as they are in a layer without (``name`` None)."""
    if name is None:
        return q_BHTD, k_BGTD
    cos, sin = tables[name]
    return apply_rope(q_BHTD, cos, sin), apply_rope(k_BGTD, cos, sin)
