"""A Dreamer that thinks less or more: other numbers of depths than it was trained for."""

from __future__ import annotations

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.errors import UserError


def set_depths(model: LT2ForCausalLM, depths: int | None) -> str | None:
    """Let the layer run so many times from now on; None: as often as it was trained to.

    Fewer: what comes after the last of them is left out, and the final norm closes the pass. More:
    the last depth again and again, each with a cache slot of its own. Saved with the config.

    Returns:
        A line for the user where the model was not trained for what it will do.

    Raises:
        UserError: no Dreamer, or no depth.
    """
    config, inner = model.config, model.model
    if inner.dreamer is None:
        raise UserError("depths can be set of a Dreamer alone; this model's layers run as they are")
    if depths is not None and depths < 1:
        raise UserError(f"depths is {depths}; a Dreamer runs at one depth at least")
    trained = len(config.made_schedule())
    config.depths = None if depths == trained else depths
    config.set_mixers(config.mixers)
    inner.schedule = config.schedule()
    return note(inner.dreamer.depth is not None, trained, len(inner.schedule))


def note(looks_at_depths: bool, trained: int, depths: int) -> str | None:
    """What a user has to know of depths that were not trained."""
    if depths == trained:
        return None
    if depths < trained:
        return f"trained for {trained} depths, runs {depths}: it was not trained to stop there"
    line = f"trained for {trained} depths, runs {depths}: the others repeat the last one's routing"
    if looks_at_depths:
        line += ", and depth attention, which was not trained for them, does not see them"
    return line
