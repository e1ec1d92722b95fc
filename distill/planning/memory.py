"""Peak memory of each stage, by what takes it. Everything is in bytes.

Weights, gradients and optimiser follow from the code: the teacher is held in fp32; a student before
`logits` shares all but its mixers with it; `logits` and `longctx` train an fp32 copy beside the
student they start from; AdamW keeps two fp32 values a weight; in bf16, frozen models are held
a second time with rounded matrices, and a training student's matrices are cast once a step.

Activations are what autograd keeps, measured on the reference kernels: bytes a token and visit are
``c * hidden + f * intermediate + m * heads * head_dim``, and what ``masks`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ltconvert.convert.inspect import LayerFacts, ModelFacts
from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.planning.masks import mask_bytes
from ltconvert.distill.planning.models import Models
from ltconvert.distill.selection.cost import batch_shape
from ltconvert.kernels import dispatch
from ltconvert.kernels.linear_kl import CHUNK_BYTES
from ltconvert.kernels.linear_kl.chunks import MOST_TOKENS, row_width
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.stages import AlignSettings, LogitsSettings, SelectSettings

FP32, BF16 = 4, 2
# Scoring layers keeps three of each model (`selection.compare`); training by the reference kernel
# needs about two.
_CHUNK_COPIES = 6
RUNTIME_BYTES = 700 << 20  # interpreter, libraries, or a GPU's context
# (hidden, intermediate, heads * head_dim) coefficients; tests hold them against autograd.
_SAVED = {
    ("full", "fp32"): (24, 16, 16),
    ("full", "bf16"): (30, 8, 10),
    ("gdn", "fp32"): (26, 16, 44),
    ("gdn", "bf16"): (34, 8, 26),
}
_SAVED_SANDWICH, _SAVED_QK_NORM = 16, 16
# Corrections of a loop's own: of the rank, for each matrix of the mixer and of the MLP.
_SAVED_CORRECTION, _MIXER_MATRICES, _MLP_MATRICES = {"fp32": 4, "bf16": 2}, 4, 3
# Beside what Gated DeltaNet keeps, of heads * head_dim: decays a channel; queries and keys before
# their norms, and v times the step; the same and positions.
_SAVED_BESIDE_GDN = {"kda": 12, "mamba2": 12, "retnet": 16}
# A window beside the recurrence: of heads * head_dim, and of each head and token of the window,
# whose scores stand in memory in plain PyTorch.
_SAVED_WINDOW = {"fp32": 21, "bf16": 17}
_SAVED_SCORE = 24
# Outputs of both parts of mixture-of-depths attention, of heads * head_dim: counted for the kernel,
# not measured. Its scores in plain PyTorch.
_SAVED_DEPTH = {"fp32": 8, "bf16": 4}
_SAVED_DEPTH_SCORE = 8
_LIVE_FORWARD = 6  # tensors of the widest kind alive in a forward pass that keeps nothing

Parts = dict[str, int]


def stage_memory(
    stage: str, recipe: Recipe, models: Models, precision: str, device: str = "cpu"
) -> Parts:
    """What a stage holds at its peak, by part; their sum is the peak."""
    parts = dict.fromkeys(
        ("runtime", "teacher", "student", "gradients", "optimiser", "activations", "logits"), 0
    )
    parts["runtime"] = RUNTIME_BYTES
    parts["teacher"] = models.teacher.parameters * FP32
    if models.ties and stage in ("align", "select"):
        parts["teacher"] += models.origin.parameters * FP32

    parts |= {
        "loop": lambda: _train(
            recipe.loop, models, precision, device, before=0, trained=models.origin
        ),
        "align": lambda: _align(recipe.align, models, precision, device),
        "select": lambda: _select(recipe, models, precision, device),
        "logits": lambda: _train(
            recipe.logits, models, precision, device, before=models.mixer_parameters
        ),
        "shrink": lambda: _shrink(recipe, models, precision, device),
        "longctx": lambda: _train(
            recipe.longctx,
            models,
            precision,
            device,
            before=models.trained_in("longctx").parameters,
            trained=models.trained_in("longctx"),
        ),
    }[stage]()
    if stage != "align":
        read = models.origin if stage == "select" else models.teacher
        parts["teacher"] += _rounded(read, precision)
    return parts


def _shrink(recipe: Recipe, models: Models, precision: str, device: str) -> Parts:
    """Of the step that takes most: the first one's pools are largest, a later one may use more."""
    before = models.hybrid.parameters
    steps = [pool.facts for pool in models.pools] or [models.trained_in("shrink")]
    parts = [
        _train(recipe.shrink, models, precision, device, before=before, trained=facts)
        for facts in steps
    ]
    return max(parts, key=lambda part: sum(part.values()))


def _align(settings: AlignSettings, models: Models, precision: str, device: str) -> Parts:
    mixers = [layer.aligned_parameters for layer in models.converted]
    at_once = settings.layers_at_once or max(len(mixers), 1)
    active = max((sum(mixers[i : i + at_once]) for i in range(0, len(mixers), at_once)), default=0)
    rows, length = settings.rows_at_once, settings.seq_len_tokens
    layers = (*models.origin.layers, *models.converted)
    masks = mask_bytes(models.spec, layers, rows, length, precision, device, one_visit=True)
    one_mixer = max(
        (saved_bytes(models.spec, x, precision, mlp=False) for x in models.converted), default=0
    )
    return {
        "student": models.mixer_parameters * FP32,
        "gradients": active * FP32,
        "optimiser": 2 * active * FP32,
        "activations": rows * length * (one_mixer + _live(models.spec)) + masks,
    }


def _select(recipe: Recipe, models: Models, precision: str, device: str) -> Parts:
    settings = recipe.select
    if settings.method in ("uniform", "list"):
        return {"student": models.mixer_parameters * FP32}
    forward = forward_select(settings, models, precision, device)
    if settings.method not in ("kl", "kl-gates"):
        return forward
    from ltconvert.distill.selection.short_training import gate_settings, short_settings

    if settings.method == "kl-gates":
        return _gates(gate_settings(recipe.logits, settings), models, precision, device)
    short, _ = short_settings(recipe.logits, settings)
    train = _train(short, models, precision, device, before=models.mixer_parameters)
    return {name: max(train.get(name, 0), forward.get(name, 0)) for name in {**train, **forward}}


def _gates(settings: LogitsSettings, models: Models, precision: str, device: str) -> Parts:
    """Both mixers of every layer and what a backward pass to the gates needs of them."""
    tokens = settings.rows_at_once * settings.seq_len_tokens
    full = [
        x.visits * saved_bytes(models.spec, x, precision, mlp=False) for x in models.origin.layers
    ]
    more = max(full) if settings.gradient_checkpointing else sum(full)
    kept = _kept(settings, models.spec, models.linear, precision, device)
    both = (*models.origin.layers, *models.linear.layers)
    masks = _masks(settings, models, both, precision, device)
    return {
        "student": models.mixer_parameters * FP32 + _rounded(models.linear, precision),
        "activations": tokens * (kept + more + _live(models.spec)) + masks,
        "logits": _chunk(models.spec.vocab_size, tokens, precision, device),
    }


def forward_select(settings: SelectSettings, models: Models, precision: str, device: str) -> Parts:
    """Both models, and the states before each layer of both."""
    rows, length = batch_shape(settings)[0], settings.seq_len_tokens
    layers = (*models.origin.layers, *models.linear.layers)
    masks = mask_bytes(models.spec, layers, rows, length, precision, device, one_visit=True)
    states = 2 * (models.spec.num_layers + models.spec.num_loops) * models.spec.hidden_size * FP32
    return {
        "student": models.mixer_parameters * FP32 + _rounded(models.linear, precision),
        "activations": rows * length * (states + _live(models.spec)) + masks,
        "logits": _CHUNK_COPIES * CHUNK_BYTES,
    }


def _train(
    settings: LogitsSettings,
    models: Models,
    precision: str,
    device: str,
    *,
    before: int,
    trained: ModelFacts | None = None,
) -> Parts:
    """A student of its own with what AdamW needs, beside ``before`` values of the former.

    ``trained``: the student; the hybrid one by default.
    """
    student = trained or models.hybrid
    size = student.parameters
    tokens = settings.rows_at_once * settings.seq_len_tokens
    # The head's gradient is added up in fp32.
    head = models.spec.vocab_size * models.spec.hidden_size * FP32
    return {
        "student": (size + before) * FP32 + _rounded(student, precision),
        "gradients": size * FP32,
        "optimiser": 2 * size * FP32,
        "activations": tokens
        * (_kept(settings, models.spec, student, precision, device) + _live(models.spec))
        + _masks(settings, models, student.layers, precision, device),
        "logits": _chunk(models.spec.vocab_size, tokens, precision, device) + head,
    }


def _chunk(vocab: int, tokens: int, precision: str, device: str) -> int:
    """Logits of both models that stand in memory at a time."""
    backend, _ = dispatch.choose("linear_kl", dispatch.asked_for("linear_kl"), device)
    if backend == "reference":
        return _CHUNK_COPIES * CHUNK_BYTES
    itemsize = BF16 if precision == "bf16" else FP32
    return 2 * min(tokens, MOST_TOKENS) * row_width(vocab) * itemsize


def _kept(
    settings: LogitsSettings, spec: TeacherSpec, student: ModelFacts, precision: str, device: str
) -> int:
    """What the forward pass keeps for the backward pass, bytes a token.

    A depth stream and its gradients stay, however much else is computed again.
    """
    layers = [
        (x.visits, saved_bytes(spec, x, precision, scores=_scores(x, settings, device)))
        for x in student.layers
    ]
    stream = 2 * student.depth_width * (BF16 if precision == "bf16" else FP32)
    if not settings.gradient_checkpointing:
        return stream + sum(visits * saved for visits, saved in layers)
    inputs = sum(visits for visits, _ in layers) * spec.hidden_size * FP32
    return stream + inputs + max(saved for _, saved in layers)


def _scores(layer: LayerFacts, settings: LogitsSettings, device: str) -> int:
    """Keys whose scores stand in memory for every query of a visit."""
    op = {"gdn_window": "window_attention", "moda": "depth_attention"}.get(layer.mixer)
    if op is None or dispatch.choose(op, dispatch.asked_for(op), device)[0] != "reference":
        return 0
    window = layer.windows[0]
    return settings.seq_len_tokens if window is None else window


def saved_bytes(
    spec: TeacherSpec,
    layer: LayerFacts,
    precision: str,
    *,
    mlp: bool = True,
    scores: int | None = None,
) -> int:
    """What autograd keeps of one visit, bytes a token.

    Without ``mlp`` the mixer's part. ``scores``: see ``_scores``; by default those of a window
    beside a recurrence. Of a Dreamer as much as of so many layers
    as a token has rows.
    """
    linear = MIXERS[layer.mixer].keeps_state
    hidden, intermediate, heads = _SAVED["gdn" if linear else "full", precision]
    width = spec.num_attention_heads * spec.head_dim
    total = (heads + _SAVED_BESIDE_GDN.get(layer.mixer, 0)) * width
    if layer.mixer == "gdn_window":
        window = layer.windows[0]
        assert window is not None
        total += _SAVED_WINDOW[precision] * width
        scores = window if scores is None else scores
    a_score = _SAVED_DEPTH_SCORE if layer.mixer == "moda" else _SAVED_SCORE
    total += a_score * (scores or 0) * spec.num_attention_heads
    if layer.mixer == "moda":
        total += _SAVED_DEPTH[precision] * width
    if spec.qk_norm is not None:
        total += _SAVED_QK_NORM * width
    _, rank = spec.own_tensors(layer.layer)
    matrices = _MIXER_MATRICES + (_MLP_MATRICES if mlp else 0)
    total += _SAVED_CORRECTION[precision] * rank * matrices
    if not mlp:
        return total + 12 * spec.hidden_size
    if spec.norm_layout in ("sandwich", "outer"):
        hidden += _SAVED_SANDWICH
    total += hidden * spec.hidden_size + intermediate * spec.intermediate_size
    return layer.rows * total


def _live(spec: TeacherSpec) -> int:
    widest = max(spec.intermediate_size, 3 * spec.num_attention_heads * spec.head_dim)
    return _LIVE_FORWARD * widest * FP32


def _masks(
    settings: LogitsSettings,
    models: Models,
    layers: Sequence[LayerFacts],
    precision: str,
    device: str,
) -> int:
    rows, length = settings.rows_at_once, settings.seq_len_tokens
    one_visit = settings.gradient_checkpointing
    return mask_bytes(models.spec, layers, rows, length, precision, device, one_visit=one_visit)


def _rounded(model: ModelFacts, precision: str) -> int:
    return (model.parameters - model.embedding_parameters) * BF16 if precision == "bf16" else 0
