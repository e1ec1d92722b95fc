"""Gated delta rule: linear attention whose state forgets, and corrects itself instead of adding.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), equation 10, in
transposed form: the state here is [K, V] and is read as S^T q. With a decay for each key channel:
Kimi Team, "Kimi Linear" (arXiv 2510.26692), equation 1 (Kimi Delta Attention).

B batch, T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.chunkwise.arguments import check_sequence, check_step
from ltconvert.kernels.segments import clear_padding, padding_mask, segment_counts


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None = None,
    *,
    initial_state_BHKV: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    keep_BT: Tensor | None = None,
    scale: float | None = None,
    l2norm_qk: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over a sequence: (outputs [B, T, H, V], final state [B, H, K, V]).

    For every batch row and head, with a_t = exp(log_decay_t) (1 when None) and S_0 the initial
    state (0 when None)::

        S_t = a_t S_{t-1} + beta_t k_t (v_t - (a_t S_{t-1})^T k_t)^T
        o_t = scale * S_t^T q_t

    `log_decay` is [B, T, H], or [B, T, H, K] for a decay of its own for each key channel, that is
    each row of the state: a_t S then reads diag(a_t) S. It is meant to be <= 0; -inf forgets all.
    `l2norm_qk` first divides q and k by their length (safe at the zero vector). `scale` is
    K ** -0.5 when None.

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
    check_sequence("delta_rule", q_BTHK, k_BTHK, v_BTHV, initial_state_BHKV, grids, chunk_size)
    _check_rates(q_BTHK, beta_BTH, log_decay)
    keep_BT = padding_mask(keep_BT)
    limit = limits.of_linear_attention(q_BTHK, k_BTHK, v_BTHV, log_decay, chunk_size)
    return dispatch.implementation("delta_rule", q_BTHK.device, limit).delta_rule(
        *clear_padding(keep_BT, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay),
        initial_state_BHKV,
        segment_counts(segment_ids_BT, keep_BT),
        scale=q_BTHK.shape[-1] ** -0.5 if scale is None else scale,
        l2norm_qk=l2norm_qk,
        chunk_size=chunk_size,
    )


def delta_rule_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    beta_BH: Tensor,
    log_decay: Tensor | None,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
    l2norm_qk: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run one token of `delta_rule`: (output [B, H, V], new state [B, H, K, V]).

    Same formula, dtypes and defaults as `delta_rule`, log_decay [B, H] or [B, H, K]; `state_BHKV`
    is not changed.
    Raises ValueError on shapes that do not fit together.
    """
    check_step(q_BHK, k_BHK, v_BHV, state_BHKV)
    _check_rates(q_BHK, beta_BH, log_decay)
    return dispatch.implementation("delta_rule", q_BHK.device).delta_rule_step(
        q_BHK,
        k_BHK,
        v_BHV,
        beta_BH,
        log_decay,
        state_BHKV,
        scale=q_BHK.shape[-1] ** -0.5 if scale is None else scale,
        l2norm_qk=l2norm_qk,
    )


def _check_rates(q: Tensor, beta: Tensor, log_decay: Tensor | None) -> None:
    if beta.shape != q.shape[:-1]:
        raise ValueError(
            f"beta must be {list(q.shape[:-1])}, as q without its last axis, got {list(beta.shape)}"
        )
    if log_decay is not None and log_decay.shape not in (q.shape[:-1], q.shape):
        raise ValueError(
            f"log_decay must have beta's shape {list(q.shape[:-1])}, or q's {list(q.shape)} for a "
            f"decay of each key channel, got {list(log_decay.shape)}"
        )
