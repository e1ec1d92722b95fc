"""What the arguments of ``depth_attention`` have to be; every error says what was got.

B batch, T queries, S keys, N slots of a buffer, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from torch import Tensor


def check_depth(
    q_BTHD: Tensor, depth_k_BTNGD: Tensor, depth_v_BTNGD: Tensor, slots: int, groups: int
) -> None:
    """Raise ValueError unless the slots fit the queries and hold ``slots`` of them."""
    batch, length, heads, width = q_BTHD.shape
    held = depth_k_BTNGD.shape[2]
    if (
        depth_k_BTNGD.shape != (batch, length, held, groups, width)
        or depth_v_BTNGD.shape != depth_k_BTNGD.shape
        or heads % groups
    ):
        raise ValueError(
            f"with queries {list(q_BTHD.shape)} and {groups} key/value heads, depth keys and "
            f"values must be [{batch}, {length}, slots, {groups}, {width}], got "
            f"{list(depth_k_BTNGD.shape)} and {list(depth_v_BTNGD.shape)}"
        )
    if not 0 <= slots <= held:
        raise ValueError(f"slots must be 0 to {held}, which the buffers hold, got {slots}")


def check_merge(q_BTHD: Tensor, schedule: float | Tensor, bias_H: Tensor | None) -> None:
    """Raise ValueError unless the schedule is one number and the bias one a head."""
    if isinstance(schedule, Tensor):
        if schedule.numel() != 1:
            raise ValueError(f"the schedule is one number, got {list(schedule.shape)}")
    elif not 0.0 <= schedule <= 1.0:
        raise ValueError(f"the schedule goes from 0 to 1, got {schedule}")
    if bias_H is not None and bias_H.shape != q_BTHD.shape[2:3]:
        raise ValueError(f"the bias must be [{q_BTHD.shape[2]}], got {list(bias_H.shape)}")
