"""Where full attention looks: at depth, by what left a slot, and at a document's first token.

The first token is where attention goes that has nothing to look for (an attention sink). Slots of
depth are another place for it, and published models with mixture-of-depths attention have smaller
sinks (arXiv 2603.15619, section 4). Weights are computed anew for some queries of every row.

B rows, T tokens, N slots, n sampled queries, H query heads, G key/value heads, D head width,
K buckets of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.mixers import MixtureOfDepths
from ltconvert.convert.mixers.attention import Attention, exact_scores
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.students.depth_plan import ATTENTION, FFN
from ltconvert.convert.students.loop import Step
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.scores import NUM_BUCKETS, bucket_edges, bucket_of, last_hidden
from ltconvert.distill.precision import autocast

QUERIES = 64  # of a row, evenly spaced
COLUMNS = (ATTENTION, FFN, "sink", "count")  # what is added up for every bucket of positions
_Attend = Callable[[Tensor, Tensor, Tensor, SequenceContext], Tensor]


@torch.inference_mode()
def depth_mass(
    model: LT2ForCausalLM, batches: Iterable[Batch], *, precision: str = "fp32"
) -> dict[str, Any]:
    """Shares of attention weight, means over heads and over queries behind a first token.

    Returns:
        ``visits``: of each visit of a layer with full attention ``layer``, ``loop``, ``attention``
        and ``ffn`` (weight on slots by what left them) and ``sink``. ``by_position``: the same
        without layers, over visits that read depth, for [``first``, ``end``) tokens before.
        ``queries``: how many were looked at.
    """
    inner = model.model
    steps = [s for s in inner.schedule if not inner.layers[s.layer].mixer.converted]
    sums = torch.zeros(len(steps), NUM_BUCKETS, len(COLUMNS), dtype=torch.float64)
    for batch in batches:
        batch = batch.to(model.device)
        with _watched(model, steps, sums), autocast(model.device, precision):
            last_hidden(model, batch)
    readers = [_kinds(model, step) != () for step in steps]
    queries = float(sums[:1, :, -1].sum()) / inner.spec.num_attention_heads
    return {
        "visits": [
            {"layer": step.layer, "loop": step.loop} | _means(of_visit.sum(0))
            for step, of_visit in zip(steps, sums, strict=True)
        ],
        "by_position": [
            dict(zip(("first", "end"), bucket_edges(k), strict=True)) | _means(of_bucket)
            for k, of_bucket in enumerate(sums[readers].sum(0))
            if of_bucket[-1] > 0
        ],
        "queries": round(queries),
    }


def _means(sums: Tensor) -> dict[str, float]:
    *values, count = sums.tolist()
    return {name: value / max(count, 1) for name, value in zip(COLUMNS, values, strict=False)}


def _kinds(model: LT2ForCausalLM, step: Step) -> tuple[str, ...]:
    """What left the slots that a visit reads."""
    plan = model.model.depth_plan
    if plan is None:
        return ()
    visit = plan.visits[step.slot]
    return plan.kinds[visit.first : visit.stop]


@contextmanager
def _watched(model: LT2ForCausalLM, steps: list[Step], sums: Tensor) -> Iterator[None]:
    """Add up the weights of one pass; full attention comes by in the order of ``steps``."""
    order = iter(range(len(steps)))

    def watching(mixer: Any, attend: _Attend) -> _Attend:
        def watched(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
            visit = next(order)
            sums[visit] += _added_up(mixer, q, k, context, _kinds(model, steps[visit])).cpu()
            return attend(q, k, v, context)

        return watched

    with ExitStack() as stack:
        for mixer in {model.model.layers[step.layer].mixer for step in steps}:
            mixer.attend = watching(mixer, mixer.attend)
            stack.callback(delattr, mixer, "attend")
        yield


def _added_up(
    mixer: Attention,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    context: SequenceContext,
    kinds: tuple[str, ...],
) -> Tensor:
    """Sums over heads and sampled queries, [K, len(COLUMNS)], fp64."""
    length = context.num_tokens
    at_n = torch.linspace(0, length - 1, min(QUERIES, length), device=q_BHTD.device).long()
    with torch.autocast(q_BHTD.device.type, enabled=False):
        slots_BHnN, sink_BHn = _weights(mixer, q_BHTD[:, :, at_n], k_BGTD, context, at_n)
    positions_Bn = context.positions_BT.expand(len(q_BHTD), -1)[:, at_n]
    counted_Bn = positions_Bn > 0  # a first token can look at nothing but itself
    if context.keep_BT is not None:
        counted_Bn = counted_Bn & context.keep_BT[:, at_n]
    by_kind = [slots_BHnN[..., [kind == of for of in kinds]].sum(-1) for kind in COLUMNS[:2]]
    columns = torch.stack([*by_kind, sink_BHn, torch.ones_like(sink_BHn)], dim=-1).double()
    sums = columns.new_zeros(NUM_BUCKETS, len(COLUMNS))
    return sums.index_add(0, bucket_of(positions_Bn)[counted_Bn], columns.sum(1)[counted_Bn])


def _weights(
    mixer: Attention, q_BHnD: Tensor, k_BGTD: Tensor, context: SequenceContext, at_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights on every slot [B, H, n, N], and on the first token of the query's document."""
    spec, length = mixer.spec, k_BGTD.shape[2]
    group = mixer.num_heads // mixer.num_key_value_heads
    how = spec.attention_scale, spec.attention_softcap
    scores = exact_scores(q_BHnD, k_BGTD.repeat_interleave(group, dim=1), *how)
    mask = context.attention_mask(mixer.window, length)
    seen = torch.arange(length, device=at_n.device) <= at_n[:, None]
    scores = scores.masked_fill(~(seen if mask is None else mask[:, :, at_n]), float("-inf"))
    log_sum_BHn1 = scores.logsumexp(-1, keepdim=True)
    starts_B1n1 = context.starts(length)[:, None, at_n, None]
    first_BHn1 = scores.gather(-1, starts_B1n1.expand(*scores.shape[:3], 1))
    sink_BHn1, view = (first_BHn1 - log_sum_BHn1).exp(), context.depth
    if not isinstance(mixer, MixtureOfDepths) or view is None or not view.count:
        return sink_BHn1[..., :0], sink_BHn1[..., 0]
    k_BTNGD = view.slots[mixer.depth_rope_name].keys_BTNGD[:, :, : view.count]
    k_BGnND = k_BTNGD[:, at_n].permute(0, 3, 1, 2, 4)
    depth = exact_scores(q_BHnD[..., None, :], k_BGnND.repeat_interleave(group, dim=1), *how)
    depth_BHnN = depth[..., 0, :]
    ahead_BHn1 = depth_BHnN.logsumexp(-1, keepdim=True) - log_sum_BHn1
    if mixer.depth_bias is not None:
        ahead_BHn1 = ahead_BHn1 + mixer.depth_bias[:, None, None]
    share_BHn1 = view.schedule * torch.sigmoid(ahead_BHn1)
    return share_BHn1 * depth_BHnN.softmax(-1), ((1 - share_BHn1) * sink_BHn1)[..., 0]
