"""Teacher tensors -> student tensors: each used exactly once or listed as new, else an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers import Projections
from ltconvert.convert.mixers.moda import SlotProjection
from ltconvert.convert.students.depth import prepare_depth
from ltconvert.convert.students.depth_plan import FFN
from ltconvert.convert.students.dreamer.build import dreamer_options, dreamer_tensors
from ltconvert.convert.students.dreamer.taken_over import taken_over
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM, LT2Model
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.tying import tie_layers, tied_spec
from ltconvert.errors import UserError


def build_student(
    teacher: LT2ForCausalLM,
    mixers: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    share: bool = False,
    dtype: torch.dtype | None = None,
) -> LT2ForCausalLM:
    """A student with the given mixer in each physical layer, started from the teacher.

    Args:
        mixers: one of ``MIXERS`` a physical layer; a Dreamer's are the teacher's.
        options: keywords of ``LT2Config.from_spec`` (``conv_size``, ``loops`` ...).
        share: let the tensors that both have in common be the same memory (for stages that train
            mixers only); otherwise the student owns copies.
        dtype: of the student's own tensors; the teacher's by default. Needs ``share=False`` to
            reach the common ones.

    Raises:
        ValueError: a teacher tensor has no place in the student, or a mixer is unknown.
        UserError: no Dreamer has these mixers.
    """
    options = dict(options or {})
    if options.get("dreamer") is not None:
        options |= _inherited_options(teacher, mixers)
    config = LT2Config.from_spec(teacher.config.spec(), **{"mixers": mixers} | options)
    dtype = dtype or teacher.dtype
    with torch.device("meta"):
        student = LT2ForCausalLM(config)
    own: dict[str, Tensor] = {}
    for layer, kind in enumerate(() if config.dreamer else config.mixers):
        mixer = inherited_mixer(student.model, kind, teacher, layer, dtype=dtype, copy=not share)
        student.model.layers[layer].mixer = mixer
    for name, value in _outside_mixers(teacher):
        if config.dreamer is None or not name.startswith("model.layers."):
            own[name] = value.detach() if share else value.detach().clone().to(dtype)
    if config.loop_residual:
        rho = own.get("model.loop_residual")  # a teacher that was itself a student may have one
        shape = student.model.loop_residual.shape
        own["model.loop_residual"] = (
            torch.zeros(shape, dtype=dtype, device=teacher.device)
            if rho is None
            else rho[: config.num_loops]
        )
    own |= _depth_tensors(student, teacher, dtype)
    if config.dreamer is not None:
        own |= dreamer_tensors(student, teacher, dtype)
    _assign(student, own)
    student.tie_weights()
    student.generation_config = teacher.generation_config
    return student.train(teacher.training)


def _inherited_options(teacher: LT2ForCausalLM, mixers: Sequence[str]) -> dict[str, Any]:
    """What a Dreamer takes over beside tensors, see ``taken_over``."""
    if list(mixers) != teacher.config.mixers:
        raise UserError(
            f"a Dreamer of mixers {list(mixers)} needs a teacher that has them, and this one has "
            f"{teacher.config.mixers}; give the teacher's"
        )
    return taken_over(teacher.config)


def inherited_mixer(
    model: LT2Model,
    kind: str,
    teacher: LT2ForCausalLM,
    layer: int,
    *,
    dtype: torch.dtype | None = None,
    copy: bool = True,
) -> Projections:
    """A mixer of ``model``'s options for one layer, its tensors taken from the teacher's mixer.

    Raises:
        ValueError: the mixer has no place for one of the teacher's tensors.
    """
    source = teacher.model.layers[layer].mixer
    mixer = model.make_mixer(kind, layer).to(device=teacher.device, dtype=dtype or teacher.dtype)
    inherited = mixer.inherit({name: value.detach() for name, value in source.state_dict().items()})
    known = mixer.state_dict()
    lost = sorted(set(inherited) - set(known))
    if lost:
        raise ValueError(
            f"layer {layer}: a {kind} mixer has no place for the teacher's {', '.join(lost)}"
        )
    if source.kind == "full" and not (
        mixer.converted or copy
    ):  # other mixers train where tensors are shared
        mixer.load_state_dict({**known, **inherited}, assign=True)
    else:
        mixer.load_state_dict({**known, **inherited})
    return mixer


def new_tensors(student: LT2ForCausalLM, teacher: LT2ForCausalLM) -> list[str]:
    """Names of the student's tensors that the teacher does not have."""
    known = {name for name, _ in teacher.named_parameters()}
    return sorted(name for name, _ in student.named_parameters() if name not in known)


def restore_full(
    student: LT2ForCausalLM, teacher: LT2ForCausalLM, layers: Iterable[int], kind: str = "full"
) -> None:
    """Put the teacher's full attention back into physical layers of the student, in every loop.

    Args:
        kind: ``moda``: attention that starts as the teacher's and can look at earlier layers.
    """
    mixers = list(student.config.mixers)
    for layer in layers:
        mixers[layer] = kind
        student.model.layers[layer].mixer = inherited_mixer(
            student.model, kind, teacher, layer, dtype=student.dtype
        )
    student.config.set_mixers(mixers)
    for layer, kind in prepare_depth(student.model):
        projection = student.model.layers[layer].depth_proj[kind]
        projection.to(student.device, student.dtype)
        projection.inherit(_slot_start(student, teacher, layer, kind))


def _slot_start(
    student: LT2ForCausalLM, teacher: LT2ForCausalLM, layer: int, kind: str
) -> dict[str, Tensor]:
    """The teacher's attention whose values a slot starts with: the layer's own.

    Of an MLP's slot that of the next visit, which reads nearly what the MLP does.
    """
    source = layer
    if kind == FFN:
        schedule = student.model.schedule
        source = next(b.layer for a, b in pairwise(schedule) if a.layer == layer)
    tensors: dict[str, Tensor] = teacher.model.layers[source].mixer.state_dict()
    return tensors


def _depth_tensors(
    student: LT2ForCausalLM, teacher: LT2ForCausalLM, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Start of what a student has for its depth stream outside of mixers, by name."""
    made: dict[str, Tensor] = {}
    if student.model.depth_plan is not None:
        made["model.depth_schedule"] = torch.zeros((), dtype=dtype, device=teacher.device)
    for layer, block in enumerate(student.model.layers):
        for kind in block.depth_proj:
            projection = SlotProjection(student.model.spec).to(teacher.device, dtype)
            projection.inherit(_slot_start(student, teacher, layer, kind))
            stem = f"model.layers.{layer}.depth_proj.{kind}"
            made |= {f"{stem}.{name}": p.detach() for name, p in projection.named_parameters()}
    return made


@contextmanager
def swapped(model: LT2ForCausalLM, layer: int, mixer: nn.Module) -> Iterator[None]:
    """Another mixer in one physical layer (all loops) for uncached passes within the block."""
    holder = model.model.layers[layer]
    kept = holder.mixer
    holder.mixer = mixer
    try:
        yield
    finally:
        holder.mixer = kept


def _outside_mixers(teacher: LT2ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    for name, value in teacher.named_parameters():  # a tied head appears once, as the embedding
        if ".mixer." not in name:
            yield name, value


def _assign(student: LT2ForCausalLM, own: dict[str, Tensor]) -> None:
    missing, unexpected = student.load_state_dict(own, strict=False, assign=True)
    tied = {"lm_head.weight"} if student.config.tie_word_embeddings else set()
    lost = sorted(name for name in set(missing) - tied if ".mixer." not in name)
    if unexpected or lost:
        raise ValueError(
            f"teacher and student do not match: no place for {sorted(unexpected)}, "
            f"no value for {lost}"
        )


def student_options(spec: TeacherSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``LT2Config.from_spec`` from a recipe's student settings.

    Args:
        spec: of the model whose layers are converted, see ``origin_spec``.

    Raises:
        UserError: more loops than the teacher has, or other loops than a teacher whose loops have
            tensors of their own.
    """
    names = (
        "window_tokens", "short_conv", "conv_size", "top_k_tokens", "index_heads", "block_tokens",
        "chosen_blocks", "sdpa_gate", "loop_residual", "depth_writers", "depth_slots",
        "depth_rope", "depth_bias", "depth_linear_writes",
    )  # fmt: skip
    options = {name: settings[name] for name in names}
    options["dreamer"] = dreamer_options(spec, settings)
    for name, own in _loops_of(spec).items():
        options[name] = own if settings[name] is None else settings[name]
    loops = options["loops"]
    if loops > spec.num_loops:
        tie = ", or tie its layers by student.loop_start" if spec.num_loops == 1 else ""
        raise UserError(
            f"student.loops is {loops}, the teacher runs {spec.num_loops}; "
            f"choose 1 to {spec.num_loops}{tie}"
        )
    for name, own in _loops_of(spec).items():
        if spec.tied_rank is not None and options[name] != own:
            raise UserError(
                f"student.{name} is {options[name]}, and the loops of this teacher have tensors "
                f"of their own for {own}; leave it out"
            )
    return options


def _loops_of(spec: TeacherSpec) -> dict[str, int]:
    """A model's own values of the settings that say how a student loops."""
    return {
        "loops": spec.num_loops,
        "prelude_layers": spec.prelude_layers,
        "coda_layers": spec.coda_layers,
    }


def _tying(settings: Mapping[str, Any]) -> dict[str, int]:
    """How a recipe's student settings loop a dense teacher, as keywords of ``tied_spec``."""
    return {
        "loops": settings["loops"],
        "prelude": settings["prelude_layers"] or 0,
        "coda": settings["coda_layers"] or 0,
        "rank": settings["loop_rank"],
    }


def origin_spec(spec: TeacherSpec, settings: Mapping[str, Any]) -> TeacherSpec:
    """The architecture whose layers are converted: the teacher's, or that of its looped form.

    Raises:
        UserError: the teacher cannot be looped as the student settings want it.
    """
    return spec if settings["loop_start"] is None else tied_spec(spec, **_tying(settings))


def origin_model(
    teacher: LT2ForCausalLM,
    settings: Mapping[str, Any],
    squares: Mapping[str, Tensor] | None = None,
) -> LT2ForCausalLM:
    """The model of ``origin_spec`` before any training; the teacher itself where nothing is tied.

    Args:
        squares: see ``tie_layers``.

    Raises:
        UserError: as ``origin_spec``.
    """
    if settings["loop_start"] is None:
        return teacher
    return tie_layers(teacher, start=settings["loop_start"], squares=squares, **_tying(settings))
