"""What the arguments of ``depth_attention`` have to be; every error says what was got.

B batch, T queries, S keys, N slots of a buffer, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.segments import check_token_grid


def check_sequence(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    window: int | None,
    segment_ids_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> None:
    """Raise ValueError unless keys, values and what restricts them fit the queries."""
    batch, length, heads, width = q_BTHD.shape
    keys, groups = k_BSGD.shape[1:3]
    if (
        k_BSGD.shape != (batch, keys, groups, width)
        or v_BSGD.shape != k_BSGD.shape
        or not 0 < length <= keys
        or heads % groups
    ):
        raise ValueError(
            f"with queries {list(q_BTHD.shape)}, keys and values must be [{batch}, {length} or "
            f"more, a divisor of {heads}, {width}], got {list(k_BSGD.shape)} and "
            f"{list(v_BSGD.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window has at least 1 token, got {window}")
    if segment_ids_BT is not None and keys > length:
        raise ValueError(f"segments go with as many keys as queries, got {keys} for {length}")
    check_token_grid("segment_ids", segment_ids_BT, batch, length)
    check_token_grid("keep", keep_BS, batch, keys)


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
