"""RoPE parameters out of a published config, in the old form and in that of transformers 5."""

from __future__ import annotations

from typing import Any

from ltconvert.convert.mixers.rope import check_rope
from ltconvert.convert.teachers.family import Config
from ltconvert.errors import UserError

ONE_ROPE = "default"
_KEEP_ORIGINAL_LENGTH = ("llama3", "yarn")


def read_rope(
    config: Config,
    *,
    layer_types: list[str],
    head_dim: int,
    max_positions: int,
    default_theta: float = 10_000.0,
) -> tuple[dict[str, dict[str, Any]], tuple[str | None, ...]]:
    """``(rope, layer_rope)`` as TeacherSpec holds them.

    Forms understood: ``rope_parameters`` (one dict, or one a layer type, where null means a layer
    type without positions), and the older ``rope_theta`` with ``rope_scaling`` (null, a scaling,
    or a dict that only says ``default``; its type under ``rope_type`` or ``type``).

    Raises:
        UserError: a RoPE that ltconvert does not compute, or two forms that say different things.
    """
    parameters = _typed(config.get("rope_parameters") or {})
    scaling = _typed(config.get("rope_scaling") or {})
    nested = any(isinstance(value, dict) for value in parameters.values())
    if (nested and scaling) or any(parameters.get(k, v) != v for k, v in scaling.items()):
        raise UserError(
            f"this config has rope_parameters {parameters} and rope_scaling {scaling}, which do "
            "not agree; write what is meant into rope_parameters and leave rope_scaling out"
        )
    if nested:
        rope = {
            name: complete_rope(config, value, head_dim, max_positions, default_theta)
            for name, value in parameters.items()
            if value is not None and name in layer_types
        }
        return rope, tuple(kind if kind in rope else None for kind in layer_types)
    one = complete_rope(config, parameters | scaling, head_dim, max_positions, default_theta)
    return {ONE_ROPE: one}, (ONE_ROPE,) * len(layer_types)


def complete_rope(
    config: Config,
    parameters: dict[str, Any],
    head_dim: int,
    max_positions: int,
    default_theta: float,
) -> dict[str, Any]:
    """One RoPE dict with the type, the base and all lengths filled in, checked.

    The order of precedence is transformers': the dict itself, the config's own keys, the
    family's default; a top-level ``original_max_position_embeddings`` beats the dict's.
    """
    rope = _typed({key: value for key, value in parameters.items() if value is not None})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or default_theta)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None:
        rope["partial_rotary_factor"] = partial
    if rope["rope_type"] in _KEEP_ORIGINAL_LENGTH:
        original = config.get("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings") or max_positions
        rope["original_max_position_embeddings"] = original
        rope.setdefault("factor", max_positions / original)
    check_rope(rope, head_dim)
    return rope


def _typed(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with their type, where they have one, under ``rope_type`` alone."""
    typed = {key: value for key, value in parameters.items() if key != "type"}
    if "type" in parameters:
        typed.setdefault("rope_type", parameters["type"])
    return typed
