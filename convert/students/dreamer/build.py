"""A teacher's layers -> the pools of a Dreamer: every tensor used exactly once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")
# A pool's module and the layer's modules that it stacks.
_SOURCES: dict[str, tuple[str, ...]] = {
    "attention.qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "attention.q_norm": ("mixer.q_norm",),
    "attention.k_norm": ("mixer.k_norm",),
    "attention.o": ("mixer.o_proj",),
    "attention.post_norm": ("post_mixer_norm",),
    "experts.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "experts.down": ("mlp.down_proj",),
    "experts.post_norm": ("post_mlp_norm",),
}
# Norms whose gains are multiplied into the matrices behind them.
_FOLDED = {
    "pre_mixer_norm": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "pre_mlp_norm": ("mlp.gate_proj", "mlp.up_proj"),
}


def dreamer_options(spec: TeacherSpec, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """A DreamerConfig as it is saved, from a recipe's student settings; None for other students.

    Raises:
        UserError: sizes that do not fit the teacher.
    """
    if settings["kind"] != "dreamer":
        return None
    if spec.tied_rank is not None:
        raise UserError(
            "student.kind dreamer needs a teacher whose loops share all of a layer; this one has "
            "tensors of each loop's own"
        )
    slices = settings["slices"]
    if spec.intermediate_size % slices:
        raise UserError(
            f"MLPs are {spec.intermediate_size} wide, which student.slices {slices} does not divide"
        )
    pools = {"entries": spec.num_layers, "experts": spec.num_layers * slices}
    names = (f.name for f in fields(DreamerConfig) if f.name in settings)
    return asdict(DreamerConfig(**pools, **{name: settings[name] for name in names}))


def dreamer_tensors(
    student: LT2ForCausalLM, teacher: LT2ForCausalLM, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of a student's one layer, by name: the pools' and those that are new.

    Raises:
        ValueError: as ``pool_tensors``.
    """
    layer = student.model.dreamer
    assert layer is not None
    work = torch.promote_types(teacher.dtype, dtype)  # gains are multiplied in before rounding
    given = {name: value.detach().to(work) for name, value in teacher.named_parameters()}
    made = pool_tensors(given, layer.config.slices, teacher.model.spec.norm_offset)
    for name, part in layer.named_children():
        if name not in ("attention", "experts"):
            part.to_empty(device=teacher.device).apply(student._init_weights)
    for name, value in layer.state_dict().items():
        if not value.is_meta:
            made[name] = value
        elif "." not in name:  # the layer's own, which start at 0
            made[name] = torch.zeros_like(value, device=teacher.device)
    return {f"model.dreamer.{name}": value.detach().to(dtype) for name, value in made.items()}


def pool_tensors(
    teacher: Mapping[str, Tensor], slices: int, norm_offset: float
) -> dict[str, Tensor]:
    """Tensors of both pools, by their names in the layer, from a teacher's named tensors.

    Raises:
        ValueError: a tensor of a layer has no place in the pools.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    for name, value in teacher.items():
        if match := _LAYER_TENSOR.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = value.detach()
    stacks: dict[str, list[Tensor]] = {}
    for layer, tensors in sorted(layers.items()):
        _fold(tensors, norm_offset)
        for name, value in _of_layer(tensors, slices).items():
            stacks.setdefault(name, []).append(value)
        if tensors:
            raise ValueError(f"a Dreamer has no place for layer {layer}'s {min(tensors)}")
    return {name: torch.cat(values) for name, values in stacks.items()}


def _fold(tensors: dict[str, Tensor], norm_offset: float) -> None:
    """Multiply gains into the matrices that read what they scale: ``W (g x) = (W g) x``."""
    for norm, readers in _FOLDED.items():
        if (gain := tensors.pop(f"{norm}.weight", None)) is not None:
            for reader in readers:
                tensors[f"{reader}.weight"] = tensors[f"{reader}.weight"] * (gain + norm_offset)


def _of_layer(tensors: dict[str, Tensor], slices: int) -> dict[str, Tensor]:
    """One layer's experts [1 or slices, ...], by name; takes what it uses out of ``tensors``."""
    made: dict[str, Tensor] = {}
    for target, sources in _SOURCES.items():
        for kind in ("weight", "bias"):
            found = [tensors.pop(f"{source}.{kind}", None) for source in sources]
            cut = [_cut(x, f"{target}.{kind}", slices) for x in found if x is not None]
            if cut:
                made[f"{target}.{kind}"] = torch.cat(cut, dim=1)
    return made


def _cut(value: Tensor, name: str, slices: int) -> Tensor:
    """A layer's tensor as that of its experts, [experts, ...].

    An MLP is the sum of slices of its width. Gains of its norms are each slice's, and each adds
    its part of the bias behind them.
    """
    if name.startswith("attention."):
        return value[None]
    if name.startswith("experts.gate_up"):
        return value.unflatten(0, (slices, -1))
    if name == "experts.down.weight":
        return value.unflatten(1, (slices, -1)).movedim(1, 0)
    if name == "experts.down.bias":
        value = value / slices
    return value.expand(slices, *value.shape)
