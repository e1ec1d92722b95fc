"""A teacher's layers -> the pools of a Dreamer: every tensor used exactly once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.mixers.joint import ALIGNED
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.taken_over import RECURRENT, mixer_kind
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")
# A pool's module and the layer's modules that it stacks; `attention.qkv` by the mixer's kind.
_SOURCES: dict[str, tuple[str, ...]] = {
    "attention.q_norm": ("mixer.q_norm",),
    "attention.k_norm": ("mixer.k_norm",),
    "attention.o": ("mixer.o_proj",),
    "attention.post_norm": ("post_mixer_norm",),
    "experts.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "experts.down": ("mlp.down_proj",),
    "experts.post_norm": ("post_mlp_norm",),
}
_MLP_READERS = ("mlp.gate_proj", "mlp.up_proj")


def _readers(kind: str) -> tuple[str, ...]:
    """Modules of a layer that project the input of its mixer, in the order of the pool."""
    made = MIXERS[kind]
    names = made.projections() if issubclass(made, LinearMixer) else ("q_proj", "k_proj", "v_proj")
    return tuple(f"mixer.{name}" for name in names)


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
        UserError: as ``mixer_kind``.
    """
    layer = student.model.dreamer
    assert layer is not None
    work = torch.promote_types(teacher.dtype, dtype)  # gains are multiplied in before rounding
    given = {name: value.detach().to(work) for name, value in teacher.named_parameters()}
    kind, offset = mixer_kind(teacher.config.mixers), teacher.model.spec.norm_offset
    made = pool_tensors(given, layer.config.slices, offset, kind)
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
    teacher: Mapping[str, Tensor], slices: int, norm_offset: float, kind: str = "full"
) -> dict[str, Tensor]:
    """Tensors of both pools, by their names in the layer, from a teacher's named tensors.

    Args:
        kind: the mixer of all layers.

    Raises:
        ValueError: a tensor of a layer has no place in the pools.
    """
    layers: dict[int, dict[str, Tensor]] = {}
    for name, value in teacher.items():
        if match := _LAYER_TENSOR.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = value.detach()
    stacks: dict[str, list[Tensor]] = {}
    cores: dict[str, Tensor] = {}
    for layer, tensors in sorted(layers.items()):
        _fold(tensors, norm_offset, kind)
        for name, value in _of_layer(tensors, slices, kind).items():
            stacks.setdefault(name, []).append(value)
        if kind in RECURRENT:
            cores |= _core(tensors, layer)
        if tensors:
            raise ValueError(f"a Dreamer has no place for layer {layer}'s {min(tensors)}")
    return cores | {name: torch.cat(values) for name, values in stacks.items()}


def _core(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """What a mixer has beside projections, as the depth's own; taken out of ``tensors``."""
    names = [name for name in tensors if name.startswith("mixer.")]
    stem = f"attention.cores.{layer}"
    return {f"{stem}.{name.removeprefix('mixer.')}": tensors.pop(name).clone() for name in names}


def _fold(tensors: dict[str, Tensor], norm_offset: float, kind: str) -> None:
    """Multiply gains into the matrices that read what they scale: ``W (g x) = (W g) x``."""
    folded = {"pre_mixer_norm": _readers(kind), "pre_mlp_norm": _MLP_READERS}
    for norm, readers in folded.items():
        if (gain := tensors.pop(f"{norm}.weight", None)) is not None:
            for reader in readers:
                tensors[f"{reader}.weight"] = tensors[f"{reader}.weight"] * (gain + norm_offset)


def _of_layer(tensors: dict[str, Tensor], slices: int, kind: str) -> dict[str, Tensor]:
    """One layer's experts [1 or slices, ...], by name; takes what it uses out of ``tensors``."""
    made: dict[str, Tensor] = {}
    for target, sources in {"attention.qkv": _readers(kind), **_SOURCES}.items():
        joined = _taken(tensors, sources)
        if target == "attention.qkv" and kind in RECURRENT:
            joined = {n: [*x, _filling(x)] for n, x in joined.items()}
        for name, values in joined.items():
            cut = [_cut(x, f"{target}.{name}", slices) for x in values]
            made[f"{target}.{name}"] = torch.cat(cut, dim=1)
    return made


def _taken(tensors: dict[str, Tensor], sources: Sequence[str]) -> dict[str, list[Tensor]]:
    """Weights of modules and, where any has one, biases: of 0 for those without."""
    weights = {x: tensors.pop(f"{x}.weight") for x in sources if f"{x}.weight" in tensors}
    biases = {x: tensors.pop(f"{x}.bias") for x in sources if f"{x}.bias" in tensors}
    made = {"weight": list(weights.values())} if weights else {}
    if biases:
        made["bias"] = [biases.get(x, w.new_zeros(len(w))) for x, w in weights.items()]
    return made


def _filling(values: Sequence[Tensor]) -> Tensor:
    """Zeros that fill projections of a recurrence up, see ``RecurrentPool``."""
    first = values[0]
    return first.new_zeros(-sum(map(len, values)) % ALIGNED, *first.shape[1:])


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
