"""Arithmetic of each stage, and the time it takes on a device.

A forward pass multiplies and adds twice a weight and visit, and attention ``4 * heads * head_dim``
times for each token that a query sees; a backward pass costs two forwards of what it passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltconvert.convert.inspect import ModelFacts
from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import student_options
from ltconvert.distill.optim import plan_steps
from ltconvert.distill.planning.machine import Machine
from ltconvert.distill.planning.models import Models
from ltconvert.distill.selection.cost import most_cost
from ltconvert.distill.selection.result import Cost
from ltconvert.distill.selection.short_training import gate_settings, short_settings
from ltconvert.kernels.chunkwise.spans import CHUNK_TOKENS
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.stages import AlignSettings, LogitsSettings

# Share of a large matrix product's speed that a model is taken to reach; recurrences, norms and
# small products take the rest. Assumed, not measured: `plan(tokens_per_second=...)` takes a speed
# that is known.
EFFICIENCY = {"cpu": 0.4, "cuda": 0.35}
# Products of a recurrence: within a chunk with its tokens (half of each, it is causal), across
# chunks with the state. Where channels have decays, two of the delta rule's first are six each.
PRODUCTS = {
    "deltanet": (5, 3),
    "gdn": (5, 3),
    "gdn_window": (5, 3),
    "kda": (15, 3),
    "mamba2": (2, 2),
    "retnet": (2, 2),
}
# AdamW reads weight, gradient and two moments and writes three of them back; clipping reads the
# gradient once more.
OPTIMISER_BYTES = 32


@dataclass(frozen=True)
class Work:
    """What a stage computes.

    Attributes:
        tokens: data tokens, over all passes.
        steps: optimiser steps.
        flops: multiplications and additions.
        optimiser_bytes: memory traffic of all optimiser steps.
    """

    tokens: int
    steps: int
    flops: float
    optimiser_bytes: float = 0.0

    def seconds(self, machine: Machine, device_type: str) -> float:
        """Time on a device."""
        rate = machine.flops * EFFICIENCY.get(device_type, EFFICIENCY["cuda"])
        return self.flops / rate + self.optimiser_bytes / machine.bytes_per_second


def stage_work(stage: str, recipe: Recipe, models: Models) -> Work:
    """What one stage computes at most."""
    if stage == "align":
        return _align(recipe.align, models)
    if stage == "select":
        return _select(recipe, models)
    if stage == "shrink" and models.pools:
        return _shrink(recipe, models)
    return _train(getattr(recipe, stage), models, models.trained_in(stage))


def _shrink(recipe: Recipe, models: Models) -> Work:
    """All steps; before each a pass that measures use, and one without each entry."""
    settings = recipe.shrink
    one = settings.of_one_step(len(models.pools))
    works = [_train(one, models, pool.facts) for pool in models.pools]
    before = [models.hybrid, *(pool.facts for pool in models.pools[:-1])]
    length = settings.seq_len_tokens
    passes = [forward_flops(x, models.spec, length) for x in before]
    used = settings.usage_tokens * sum(passes)
    if recipe.student.pool_rank == "damage":
        entries = [models.spec.num_layers * (1 + recipe.student.slices)]
        entries += [pool.entries + pool.experts for pool in models.pools[:-1]]
        judged = zip(entries, passes, strict=True)
        used += settings.damage_tokens * sum(count * one for count, one in judged)
    return Work(
        sum(work.tokens for work in works),
        sum(work.steps for work in works),
        sum(work.flops for work in works) + used,
        sum(work.optimiser_bytes for work in works),
    )


def _align(settings: AlignSettings, models: Models) -> Work:
    plan, layers = plan_steps(settings), models.converted
    at_once = settings.layers_at_once or max(len(layers), 1)
    passes = -(-len(layers) // at_once)
    length = settings.seq_len_tokens
    teacher = forward_flops(models.origin, models.spec, length, head=False)
    mixers = sum(
        x.visits * _mixer_flops(models.linear, models.spec, x.layer, length) for x in layers
    )
    tokens = plan.steps * plan.step_tokens
    return Work(
        tokens * passes,
        plan.steps * passes,
        tokens * (passes * teacher + 3 * mixers),
        plan.steps * models.aligned_parameters * OPTIMISER_BYTES,
    )


def _train(settings: LogitsSettings, models: Models, trained: ModelFacts) -> Work:
    plan, length = plan_steps(settings), settings.seq_len_tokens
    teacher = forward_flops(models.teacher, models.spec, length)
    student = forward_flops(trained, models.spec, length)
    passes = 4 if settings.gradient_checkpointing else 3
    tokens = plan.steps * plan.step_tokens
    return Work(
        tokens,
        plan.steps,
        tokens * (teacher + passes * student),
        plan.steps * trained.parameters * OPTIMISER_BYTES,
    )


def selection_cost(recipe: Recipe, models: Models) -> Cost:
    """What selecting costs if nothing settles early; where the layers are listed nothing."""
    if isinstance(recipe.student.full_layers, list):
        return Cost()
    options = student_options(models.spec, recipe.student.model_dump())
    config = LT2Config.from_spec(models.spec, **options)
    return most_cost(recipe.select, config.schedule(), models.keep)


def _select(recipe: Recipe, models: Models) -> Work:
    cost, length = selection_cost(recipe, models), recipe.select.seq_len_tokens
    # Scored passes are of either model, with or without one layer changed.
    body = max(
        forward_flops(x, models.spec, length, head=False) for x in (models.origin, models.linear)
    )
    scored = _scored_tokens(recipe, models, cost)
    flops = cost.forward_tokens * body + 2 * scored * _head_flops(models.spec)
    if not cost.trained_tokens:
        return Work(cost.tokens, 0, flops)
    if recipe.select.method == "kl-gates":
        return _gates(recipe, models)
    settings, steps = short_settings(recipe.logits, recipe.select)
    one = _train(settings, models, models.hybrid)
    share = steps / (steps + 1)  # its budget holds one step that is not trained
    layers = models.spec.num_layers
    return Work(
        cost.tokens + cost.trained_tokens,
        steps * layers,
        flops + one.flops * share * layers,
        one.optimiser_bytes * share * layers,
    )


def _gates(recipe: Recipe, models: Models) -> Work:
    """The teacher, the student with both mixers, and back through it to its inputs alone."""
    settings = gate_settings(recipe.logits, recipe.select)
    plan, length = plan_steps(settings), settings.seq_len_tokens
    teacher, linear = (
        forward_flops(x, models.spec, length) for x in (models.origin, models.linear)
    )
    full = sum(
        x.visits * _mixer_flops(models.origin, models.spec, x.layer, length)
        for x in models.origin.layers
    )
    passes = 3 if settings.gradient_checkpointing else 2
    tokens = plan.steps * plan.step_tokens
    return Work(tokens, plan.steps, tokens * (teacher + passes * (linear + full)))


def _scored_tokens(recipe: Recipe, models: Models, cost: Cost) -> float:
    """Tokens whose KL is computed, over all changed models; recall scores a few answers only."""
    if recipe.select.method.startswith("recall") or not cost.tokens:
        return 0.0
    directions = 2 if (recipe.select.method, recipe.select.direction) == ("kl-fast", "both") else 1
    return float(cost.tokens * (directions * models.spec.num_layers + 1))


def forward_flops(model: ModelFacts, spec: TeacherSpec, length: int, *, head: bool = True) -> float:
    """A forward pass of one token in rows of ``length`` tokens."""
    total = 0.0
    for layer in model.layers:
        used, used_by_mixer = layer.visited
        mlp = 2 * (used - used_by_mixer)
        total += layer.visits * (mlp + _mixer_flops(model, spec, layer.layer, length))
    if spec.initial_state_std is not None:  # the prelude's output, put in by every loop
        total += spec.num_loops * 2 * 2 * spec.hidden_size**2
    return total + (_head_flops(spec) if head else 0.0)


def _mixer_flops(model: ModelFacts, spec: TeacherSpec, layer: int, length: int) -> float:
    facts = model.layers[layer]
    width = spec.num_attention_heads * spec.head_dim
    flops = 2.0 * facts.visited[1]
    if facts.mixer in PRODUCTS:
        within, across = PRODUCTS[facts.mixer]
        flops += width * (within * CHUNK_TOKENS + 2 * across * spec.head_dim)
    flops += 4 * width * facts.depth_slots
    if not MIXERS[facts.mixer].keeps_keys:
        return flops
    limits = [length / 2, *([] if facts.attended is None else [facts.attended])]
    seen = [min(limits) if w is None else min(*limits, w) for w in facts.windows]
    tokens = sum(seen) / facts.visits
    return flops + 4 * width * tokens + _choosing_flops(model, spec, layer, length)


def _choosing_flops(model: ModelFacts, spec: TeacherSpec, layer: int, length: int) -> float:
    """What it takes to look at all keys, or at one a block."""
    facts = model.layers[layer]
    return 2.0 * facts.choosing_width * length / 2


def _head_flops(spec: TeacherSpec) -> float:
    return 2.0 * spec.vocab_size * spec.hidden_size
