"""``index_kl`` in plain PyTorch; loss and gradients are made together, chunk by chunk of queries.

As in ``linear_kl`` the gradients come in the forward pass, so that no score is computed twice and
none is kept. B rows, T queries, n of a chunk, S keys, I index heads, E their width, H query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.sparse_attention.seen import chunks, seen_keys, stretch


def index_kl(
    index_q_BTIE: Tensor,
    index_k_BSE: Tensor,
    weight_BTI: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.index_kl.index_kl``."""
    loss, *_ = _index_kl(
        index_q_BTIE, index_k_BSE, weight_BTI, q_BHTD, k_BGSD, first_BT, bits_BJTW, keep_BS,
        scale, soft_cap,
    )  # fmt: skip
    return loss


# An op of its own, so that `torch.compile` does not unroll the chunks.
@torch.library.custom_op("ltconvert::index_kl_reference", mutates_args=())
def _index_kl(
    index_q_BTIE: Tensor,
    index_k_BSE: Tensor,
    weight_BTI: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, and its gradients by index queries, index keys and weights, all in fp32 (fp64)."""
    loss, dq, dk, dweight = (
        x.zero_() for x in empty_results(index_q_BTIE, index_k_BSE, weight_BTI, q_BHTD)
    )
    work = loss.dtype
    batch, length, index_heads, _ = index_q_BTIE.shape
    total, heads = index_k_BSE.shape[1], q_BHTD.shape[1]
    real_BT = real_queries(keep_BS, batch, length, q_BHTD.device)
    share = 1.0 / real_BT.sum().clamp(min=1).to(work)
    k_BSE = index_k_BSE.to(work)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        for a, b in chunks(length, batch * total * max(heads, 2 * index_heads), q_BHTD.device):
            keys = total - length + b
            seen_BnS = _seen(first_BT, bits_BJTW, keep_BS, a, b, length, total, q_BHTD.device)
            p_BnS = _attention(q_BHTD[:, :, a:b], k_BGSD[:, :, :keys], seen_BnS, scale, soft_cap)
            q_BnIE, w_BnI = index_q_BTIE[:, a:b].to(work), weight_BTI[:, a:b].to(work)
            products_BnIS = (q_BnIE @ k_BSE[:, None, :keys].mT).relu_()
            scores_BnS = (w_BnI[..., None, :] @ products_BnIS).squeeze(-2)
            log_q_BnS = scores_BnS.masked_fill(~seen_BnS, float("-inf")).log_softmax(-1)
            counts_Bn1 = (real_BT[:, a:b, None] * share).to(work)
            log_q_BnS = log_q_BnS.masked_fill(~seen_BnS, 0.0)
            loss += ((torch.xlogy(p_BnS, p_BnS) - p_BnS * log_q_BnS) * counts_Bn1).sum()
            guess_BnS = log_q_BnS.exp().masked_fill(~seen_BnS, 0.0)
            dscores_BnS = (guess_BnS - p_BnS) * counts_Bn1
            dweight[:, a:b] = (products_BnIS @ dscores_BnS[..., None]).squeeze(-1)
            dproducts_BnIS = (w_BnI[..., None] * dscores_BnS[:, :, None]).masked_fill_(
                products_BnIS == 0, 0.0
            )
            dq[:, a:b] = dproducts_BnIS @ k_BSE[:, None, :keys]
            dk[:, :keys] += dproducts_BnIS.flatten(1, 2).mT @ q_BnIE.flatten(1, 2)
    return loss, dq, dk, dweight


def real_queries(keep_BS: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Queries that count, those that are no padding, [B, T]."""
    if keep_BS is None:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    return keep_BS[:, keep_BS.shape[1] - length :].bool()


def _seen(
    first_BT: Tensor | None, bits_BJTW: Tensor | None, keep_BS: Tensor | None,
    a: int, b: int, length: int, total: int, device: torch.device,
) -> Tensor:  # fmt: skip
    """The keys that the distributions run over, [B or 1, n, keys]."""
    if bits_BJTW is None:
        return stretch(first_BT, keep_BS, a, b, length, total, device)
    return seen_keys(None, bits_BJTW, None, keep_BS, a, b, length, total, device)[:, 0]


def _attention(
    q_BHnD: Tensor, k_BGSD: Tensor, seen_BnS: Tensor, scale: float, cap: float | None
) -> Tensor:
    """Softmax over the keys seen, averaged over heads, [B, n, S]."""
    work = torch.promote_types(q_BHnD.dtype, torch.float32)
    q_BGRnD = q_BHnD.to(work).unflatten(1, (k_BGSD.shape[1], -1))
    scores = (q_BGRnD @ k_BGSD.to(work)[:, :, None].mT) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~seen_BnS[:, None, None], float("-inf")).softmax(-1).mean((1, 2))


@_index_kl.register_fake
def empty_results(
    index_q: Tensor, index_k: Tensor, weight: Tensor, q: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the loss and the gradients."""
    work = torch.promote_types(torch.promote_types(index_q.dtype, q.dtype), torch.float32)
    loss, dq, dk, dweight = (
        index_q.new_empty(shape, dtype=work)
        for shape in ((), index_q.shape, index_k.shape, weight.shape)
    )
    return loss, dq, dk, dweight


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For the backward pass, which only scales them."""
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [x.dtype for x in inputs[:3]]


def scale_gradients(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    """Gradients of all inputs of the op."""
    grads = (
        (grad * dloss).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    return (*grads, *[None] * 7)


_index_kl.register_autograd(scale_gradients, setup_context=keep_gradients)
