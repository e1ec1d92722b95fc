"""Checks of arguments that the delta rule and decay attention have in common."""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.segments import check_token_grid


def check_sequence(
    op: str,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    state_BHKV: Tensor | None,
    grids: dict[str, Tensor | None],
    chunk_size: int | None,
) -> None:
    """Raise ValueError unless the shapes fit; ``grids`` are [B, T] by name."""
    if q_BTHK.dim() != 4 or k_BTHK.shape != q_BTHK.shape:
        raise ValueError(
            "q and k must both be [batch, tokens, heads, key width], got "
            f"{list(q_BTHK.shape)} and {list(k_BTHK.shape)}"
        )
    batch, length, heads, key_width = q_BTHK.shape
    if v_BTHV.dim() != 4 or v_BTHV.shape[:-1] != q_BTHK.shape[:-1]:
        raise ValueError(
            f"v must be [batch, tokens, heads, value width] with the first three of q "
            f"{[batch, length, heads]}, got {list(v_BTHV.shape)} (repeat kv heads beforehand)"
        )
    if length == 0:
        raise ValueError(f"{op} needs at least one token, got a sequence of length 0")
    check_state("initial_state", state_BHKV, (batch, heads, key_width, v_BTHV.shape[-1]))
    for name, grid_BT in grids.items():
        check_token_grid(name, grid_BT, batch, length)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")


def check_step(q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, state_BHKV: Tensor) -> None:
    """The same of one token."""
    if q_BHK.dim() != 3 or k_BHK.shape != q_BHK.shape or v_BHV.shape[:-1] != q_BHK.shape[:-1]:
        raise ValueError(
            "q and k must be [batch, heads, key width] and v [batch, heads, value width], got "
            f"{list(q_BHK.shape)}, {list(k_BHK.shape)} and {list(v_BHV.shape)}"
        )
    check_state("state", state_BHKV, (*q_BHK.shape, v_BHV.shape[-1]))


def check_state(name: str, state_BHKV: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the state is None or of that shape."""
    if state_BHKV is not None and tuple(state_BHKV.shape) != shape:
        raise ValueError(
            f"{name} must be [batch, heads, key width, value width] = {list(shape)}, "
            f"got {list(state_BHKV.shape)}"
        )
