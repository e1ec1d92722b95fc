"""What a Dreamer takes over from a teacher that is a student itself: mixers, all of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.convert.students.lt2_config import LT2Config

# Kinds whose matrices all read the layer's input, or give its output: these make up a pool.
RECURRENT = tuple(kind for kind, made in MIXERS.items() if issubclass(made, LinearMixer))
KINDS = ("full", "window", *RECURRENT)


def mixer_kind(mixers: Sequence[str]) -> str:
    """The mixer of all layers.

    Raises:
        UserError: there are several, or one that no Dreamer can have.
    """
    kinds = sorted(set(mixers))
    if len(kinds) > 1 or kinds[0] not in KINDS:
        raise UserError(
            f"a Dreamer cannot be made of {' and '.join(kinds)} layers; its teacher has the same "
            f"mixer in all layers, one of {', '.join(KINDS)}"
        )
    return kinds[0]


def taken_over(config: LT2Config) -> dict[str, Any]:
    """Of a teacher's config, keywords of ``LT2Config.from_spec`` for it and for its Dreamer.

    Nothing of a plain teacher, whose layers are all full.

    Raises:
        UserError: as ``mixer_kind``, or layers have an output gate.
    """
    found: dict[str, Any] = {"loop_residual": True} if config.loop_residual else {}
    if mixer_kind(config.mixers) != "full":
        found |= {
            "mixers": list(config.mixers),
            "window_tokens": config.window_tokens,
            "short_conv": config.conv_size is not None,
            "conv_size": config.conv_size,
        }
    elif config.sdpa_gate:
        raise UserError(
            "the teacher's layers have output gates (student.sdpa_gate), for which a Dreamer has "
            "no place; give the model that it was made from"
        )
    return found
