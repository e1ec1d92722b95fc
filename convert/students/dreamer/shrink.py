"""Smaller pools: entries that are worth least leave, or are merged into those most like them.

Where an entry has left, a null stands in for it: a depth that preferred the entry chooses nothing
in its place, as if that part of a layer were dropped, and not a neighbour at full weight, which was
not made for it. Routing can learn to use others there again.

E entries before, E' after, L that leave, Z nulls, D depths, C hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.pools import Pool
from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.errors import UserError

How = Literal["drop", "merge"]


@dataclass(frozen=True)
class Cut:
    """What becomes of a pool.

    Attributes:
        groups: for each entry that stays the old ones that it is made of, itself first.
        shares: of each of them in the mean; they sum to 1.
    """

    groups: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    @property
    def kept(self) -> list[int]:
        """Entries that stay."""
        return [group[0] for group in self.groups]


def pool_sizes(config: DreamerConfig, layers: int, share: float) -> tuple[int, int]:
    """Entries and experts of pools with this share of what a teacher of so many layers had.

    No fewer than tokens use, no more than there are; experts of whole MLPs.
    """
    entries = max(config.top_entries, round(share * layers))
    mlps = max(-(-config.top_experts // config.slices), round(share * layers))
    return min(entries, config.entries), min(mlps * config.slices, config.experts)


def shares_kept(config: DreamerConfig, layers: int) -> tuple[float, float]:
    """What pools of attention and of experts hold of what a teacher of so many layers had."""
    return config.entries / layers, config.experts / (layers * config.slices)


def config_after(config: DreamerConfig, layers: int, share: float, how: How) -> DreamerConfig:
    """Of the model that a cut to this share leaves."""
    entries, experts = pool_sizes(config, layers, share)
    left = config.entries - entries, config.experts - experts
    if how == "merge":
        left = 0, 0
    return replace(
        config,
        entries=entries,
        experts=experts,
        null_entries=min(1, config.null_entries + left[0]),
        null_experts=min(config.slices, config.null_experts + left[1]),
    )


def configs_after(
    config: DreamerConfig, layers: int, steps: Sequence[tuple[float, int]], how: How
) -> list[DreamerConfig]:
    """Of the model that each step leaves.

    Args:
        steps: a share, and experts that a token uses from there on.

    Raises:
        UserError: those are more than the step before has left.
    """
    found: list[DreamerConfig] = []
    for share, top in steps:
        if top > config.experts:
            raise UserError(
                f"student.top_schedule: {top} experts a token in step {len(found)}, which begins "
                f"with {config.experts}; give no more, or larger shares before it"
            )
        config = config_after(replace(config, top_experts=top), layers, share, how)
        found.append(config)
    return found


def choose(
    effect_DE: Tensor,
    likeness_EE: Tensor,
    keep: int,
    how: How = "drop",
    worth_E: Tensor | None = None,
) -> Cut:
    """Keep the ``keep`` entries that are worth most; of equal ones the earlier.

    Args:
        effect_DE: what each entry did at each depth, see ``Usage``.
        likeness_EE: how alike parameters are, see ``likeness``. To it the likeness of use is added:
            entries that serve the same depths do similar work.
        how: the others leave, or enter the mean of the entry most like them, each with its effect.
        worth_E: of each entry; default: its effect, all depths together.
    """
    effect_E = effect_DE.sum(0)
    worth_E = effect_E if worth_E is None else worth_E
    ranked = worth_E.argsort(descending=True, stable=True).tolist()
    kept, others = sorted(ranked[:keep]), ranked[keep:]
    groups = {entry: [entry] for entry in kept}
    if how == "merge":
        use_DE = nn.functional.normalize(effect_DE, dim=0)
        alike_EE = likeness_EE.to(use_DE) + use_DE.T @ use_DE
        for entry in others:
            nearest = kept[int(alike_EE[entry, kept].argmax())]
            groups[nearest].append(entry)
    return Cut(
        tuple(tuple(groups[entry]) for entry in kept),
        tuple(tuple(_shares(effect_E[groups[entry]])) for entry in kept),
    )


def _shares(weights: Tensor) -> list[float]:
    total = float(weights.sum())
    return (weights / total).tolist() if total else [1 / len(weights)] * len(weights)


@torch.no_grad()
def likeness(pool: Pool) -> Tensor:
    """Cosines of all entries' parameters, [E, E] in fp32."""
    tensors = [p.flatten(1).float() for part in pool.parts() for p in part.parameters()]
    grams = [x @ x.T for x in tensors]
    gram_EE = torch.stack(grams).sum(0)
    norm_E = gram_EE.diagonal().clamp(min=1e-30).sqrt()
    return gram_EE / (norm_E[:, None] * norm_E)


@torch.no_grad()
def shrink(model: LT2ForCausalLM, attention: Cut, experts: Cut) -> None:
    """Cut both pools in place. Gradients and optimisers of before do not fit any more.

    Parameters are means by ``shares``, neurons as they stand: nothing is permuted to fit. A merged
    entry is as welcome at each depth as the most welcome of its parts. Nulls take the places of
    those that leave.

    Raises:
        UserError: routing is still forced, tokens use more than is left, or slices of an MLP are
            left that make no whole one.
    """
    layer = model.model.dreamer
    assert layer is not None, "not a Dreamer"
    if layer.released() < 1.0:
        raise UserError(
            f"routing is released to {layer.released():.2f}; a pool shrinks once it is released"
            " wholly (logits.release_share below 1)"
        )
    if len(experts.groups) % layer.config.slices:
        raise UserError(
            f"{len(experts.groups)} experts are no whole number of MLPs of {layer.config.slices}"
        )
    config = replace(
        layer.config, entries=len(attention.groups), experts=len(experts.groups)
    )  # refuses pools that are too small
    _cut_pool(layer.attention, attention)
    _cut_router(layer.attention_router, attention)
    _cut_pool(layer.experts, experts)
    _cut_router(layer.expert_router, experts)
    nulls = layer.attention_router.nulls, layer.expert_router.nulls
    _set_config(model, replace(config, null_entries=nulls[0], null_experts=nulls[1]))


def set_top_experts(model: LT2ForCausalLM, top: int) -> None:
    """Let a token use more or fewer experts at each depth from now on; weights are normalised.

    Raises:
        UserError: more than the pool holds, or fewer than the slices of one MLP.
    """
    layer = model.model.dreamer
    assert layer is not None, "not a Dreamer"
    _set_config(model, replace(layer.config, top_experts=top))
    layer.expert_router.top = top


def _set_config(model: LT2ForCausalLM, config: DreamerConfig) -> None:
    """The layer's, and what is saved of it."""
    assert model.model.dreamer is not None
    model.model.dreamer.config, model.config.dreamer = config, asdict(config)


def _cut_pool(pool: Pool, cut: Cut) -> None:
    for module in pool.parts():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, _parameter(_means(parameter, cut), parameter))


def _cut_router(router: Router, cut: Cut) -> None:
    stay = {entry for group in cut.groups for entry in group}
    keys_ZC, logits_DZ = nulls_in_place_of(router, sorted({*range(router.experts)} - stay))
    highest = [router.depth_logits[:, list(group)].amax(1) for group in cut.groups]
    logits_DE = torch.stack(highest, dim=1)
    router.keys = _parameter(torch.cat([_means(router.keys, cut), keys_ZC]), router.keys)
    router.depth_logits = _parameter(torch.cat([logits_DE, logits_DZ], 1), router.depth_logits)
    router.balance = _means(router.balance, cut)
    router.load = torch.zeros_like(router.balance)


def nulls_in_place_of(router: Router, left: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys [Z, C] and logits by depth [D, Z] of a router's nulls when these entries have left.

    There are no more nulls than slices of an MLP, new ones with a key of 0. At each depth a logit
    goes to the null whose own is lowest there, where it is higher: a depth that lost one of four
    slices of its MLP chooses one null, and four once it has lost them all.
    """
    keys_ZC, logits_DZ = router.keys[router.experts :], router.depth_logits[:, router.experts :]
    for entry in left:
        logits_D1 = router.depth_logits[:, entry, None]
        if logits_DZ.shape[1] < router.slices:
            keys_ZC = torch.cat([keys_ZC, torch.zeros_like(router.keys[:1])])
            logits_DZ = torch.cat([logits_DZ, logits_D1], dim=1)
        else:
            least_D1, at_D1 = logits_DZ.min(dim=1, keepdim=True)
            logits_DZ = logits_DZ.scatter(1, at_D1, torch.maximum(least_D1, logits_D1))
    return keys_ZC, logits_DZ


def _means(value: Tensor, cut: Cut) -> Tensor:
    """[E, ...] -> [E', ...], in the value's dtype."""
    return torch.stack(
        [
            _mean(value[list(group)], shares)
            for group, shares in zip(cut.groups, cut.shares, strict=True)
        ]
    )


def _mean(values: Tensor, shares: Sequence[float]) -> Tensor:
    if len(shares) == 1:
        return values[0].clone()
    weights = torch.tensor(shares, device=values.device, dtype=torch.float32)
    return torch.einsum("e,e...->...", weights, values.float()).to(values.dtype)


def _parameter(value: Tensor, former: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=former.requires_grad)
