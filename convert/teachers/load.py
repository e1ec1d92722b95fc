"""Loading a teacher: every family becomes the same decoder, an LT2 with all layers full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ltconvert.convert.checkpoint import load_student
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.registry import family_of
from ltconvert.convert.teachers.source import Source, resolve
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.teachers.tokenizers import fit_tokenizer
from ltconvert.convert.teachers.weights import collect, digest
from ltconvert.errors import UserError

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Teacher:
    """A loaded teacher, frozen and in eval mode.

    Attributes:
        name: short name, for people.
        source: what it was loaded from: hub id, package, or absolute path.
        revision: hub commit or package version.
        spec: its architecture.
        model: an LT2ForCausalLM whose mixers are all full; a saved student has its own.
        tokenizer: None when the source has none.
        digest: names the weights: equal for equal tensors, whatever the dtype they are held in.
        remarks: what a person should know, one line each.
    """

    name: str
    source: str
    revision: str | None
    spec: TeacherSpec
    model: LT2ForCausalLM
    tokenizer: Any
    digest: str
    remarks: tuple[str, ...] = ()


def load_teacher(
    reference: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> Teacher:
    """Load a teacher from a packaged name, a ``.gguf`` file, a folder, or a hub id.

    Raises:
        UserError: unknown reference or family, broken or unfitting weights, in one line.
    """
    source = resolve(reference, revision=revision)
    remarks = []
    if source.config.get("model_type") == "lt2":
        model = load_student(source.path, dtype=dtype, device=device)
        spec = model.config.spec()
    else:
        spec = read_spec(source)
        model, spec = _build(spec, source, dtype, device)
        _set_generation(model, source, spec)
        if source.gguf is not None:
            remarks.append(f"weights dequantised from {source.gguf.formats()}")
    tokenizer = source.tokenizer()
    if tokenizer is None:
        remarks.append("there is no tokenizer with this model")
    elif remark := fit_tokenizer(tokenizer, spec):
        remarks.append(remark)
    model.requires_grad_(False)
    return Teacher(
        name=source.name,
        source=source.location,
        revision=source.revision,
        spec=spec,
        model=model.eval(),
        tokenizer=tokenizer,
        digest=digest(model.state_dict()),
        remarks=tuple(remarks),
    )


def describe_teacher(
    reference: str, *, revision: str | None = None
) -> tuple[TeacherSpec, dict[str, Any]]:
    """``(spec, facts)`` without reading a weight.

    Facts: name, kind, source, revision, model_type, parameters (tied ones once), stored_bytes
    (None for a hub id), cache_bytes_per_token (see ``convert.inspect``).

    Raises:
        UserError: unknown reference or family.
    """
    source = resolve(reference, revision=revision)
    config = read_lt2_config(source)
    spec = config.spec()
    sizes = model_facts(config)
    facts = {
        "name": source.name,
        "kind": source.kind,
        "source": source.location,
        "revision": source.revision,
        "model_type": source.config.get("model_type"),
        "parameters": sizes.parameters,
        "stored_bytes": source.stored_bytes(),
        "cache_bytes_per_token": sizes.cache_bytes_per_token,
    }
    return spec, facts


def teacher_config(reference: str, *, revision: str | None = None) -> LT2Config:
    """The config of what a reference names, without reading a weight.

    Raises:
        UserError: unknown reference or family.
    """
    return read_lt2_config(resolve(reference, revision=revision))


def read_lt2_config(source: Source) -> LT2Config:
    """The config of what a source holds: a student's own, or the teacher's by its family."""
    if source.config.get("model_type") == "lt2":
        return LT2Config.from_dict(source.config)
    return LT2Config.from_spec(read_spec(source))


def read_spec(source: Source) -> TeacherSpec:
    """The architecture of the teacher that a source holds, from its published config alone."""
    return family_of(source.config).read_spec(source.config)


def empty_model(config: LT2Config) -> LT2ForCausalLM:
    """A model without weights, on the meta device."""
    with torch.device("meta"):
        return LT2ForCausalLM(config)


def _build(
    spec: TeacherSpec, source: Source, dtype: torch.dtype, device: str | torch.device
) -> tuple[LT2ForCausalLM, TeacherSpec]:
    """The model with the source's weights; the spec unties a head that is stored and differs."""
    empty = empty_model(LT2Config.from_spec(spec))
    shapes = {name: value.shape for name, value in empty.state_dict().items()}
    state = collect(source.tensors(), shapes, dtype, device)
    if spec.tie_word_embeddings and _HEAD in state:
        if torch.equal(state[_HEAD], state.get(_EMBEDDING, state[_HEAD])):
            del state[_HEAD]
        else:
            spec = replace(spec, tie_word_embeddings=False)
    missing = sorted(set(shapes) - set(state) - ({_HEAD} if spec.tie_word_embeddings else set()))
    if missing:
        raise UserError(
            f"{source.location} lacks {len(missing)} of {len(shapes)} tensors of its config, "
            f"first {missing[0]}: the checkpoint is not complete"
        )
    model = empty_model(LT2Config.from_spec(spec))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model, spec


def _set_generation(model: LT2ForCausalLM, source: Source, spec: TeacherSpec) -> None:
    """Generation settings of the folder, with the spec's special ids."""
    from transformers import GenerationConfig

    ids = {
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
    }
    settings = GenerationConfig()
    if source.gguf is None and (source.path / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(source.path)
    settings.update(**ids)
    try:
        settings.validate(strict=True)
    except ValueError:  # published combinations that transformers refuses to save
        settings = GenerationConfig(**ids)
    model.generation_config = settings
