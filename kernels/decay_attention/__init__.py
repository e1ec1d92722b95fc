"""Linear attention with a decaying state: retention, and the state space dual of Mamba-2.

Sources: Sun et al., "Retentive Network" (arXiv 2307.08621), equation 6, whose decay is fixed for
each head; Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), section 6, whose decay depends on
the token (there C is q, B is k, and the step times x is v).

B batch, T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.chunkwise.arguments import check_sequence, check_step
from ltconvert.kernels.segments import clear_padding, padding_mask, segment_counts


def decay_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    keep_BT: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run decayed linear attention over a sequence: (outputs [B, T, H, V], final [B, H, K, V]).

    For every batch row and head, with a_t = exp(log_decay_t) and S_0 the initial state (0 when
    None)::

        S_t = a_t S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    `log_decay` is [B, T, H], or [H] for decays that are the same at every token. It is meant to be
    <= 0; -inf forgets all. `scale` is K ** -0.5 when None. q and k that several heads share are
    repeated beforehand by `expand`, which copies nothing; their gradients are then summed.

    `segment_ids_BT` (int): where the id differs from the token before, the state is set to zero
    before that token; the first token of a row continues the initial state. `keep_BT`: False marks
    padding, which leaves the state untouched, gets output 0 and no gradient, and is looked through
    when segments are compared. `chunk_size` (tokens) is a matter of speed; None leaves it to the
    backend.

    The output has v's dtype. The state is fp32 (fp64 for fp64 inputs), and so is the arithmetic.
    Differentiable in every floating input. Autocast does not reach inside.
    Raises ValueError on shapes that do not fit together.
    """
    grids = {"segment_ids": segment_ids_BT, "keep": keep_BT}
    check_sequence("decay_attention", q_BTHK, k_BTHK, v_BTHV, initial_state_BHKV, grids, chunk_size)
    keep_BT = padding_mask(keep_BT)
    log_decay_BTH = _each_token(log_decay, tuple(q_BTHK.shape[:-1]))
    limit = limits.of_linear_attention(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, chunk_size)
    return dispatch.implementation("decay_attention", q_BTHK.device, limit).decay_attention(
        *clear_padding(keep_BT, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH),
        initial_state_BHKV,
        segment_counts(segment_ids_BT, keep_BT),
        scale=q_BTHK.shape[-1] ** -0.5 if scale is None else scale,
        chunk_size=chunk_size,
    )


def decay_attention_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    log_decay: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one token of `decay_attention`: (output [B, H, V], new state [B, H, K, V]).

    Same formula, dtypes and defaults as `decay_attention`, log_decay [B, H] or [H]; `state_BHKV`
    is not changed. Raises ValueError on shapes that do not fit together.
    """
    check_step(q_BHK, k_BHK, v_BHV, state_BHKV)
    return dispatch.implementation("decay_attention", q_BHK.device).decay_attention_step(
        q_BHK,
        k_BHK,
        v_BHV,
        _each_token(log_decay, tuple(q_BHK.shape[:-1])),
        state_BHKV,
        scale=q_BHK.shape[-1] ** -0.5 if scale is None else scale,
    )


def _each_token(log_decay: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`log_decay` with one number for every token and head."""
    if tuple(log_decay.shape) not in (shape, shape[-1:]):
        raise ValueError(
            f"log_decay must be {list(shape)}, or [{shape[-1]}] for one a head, "
            f"got {list(log_decay.shape)}"
        )
    return log_decay.expand(shape)
