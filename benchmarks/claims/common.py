"""What the scripts of the claims share: models from scratch of equal size, verdicts, tables."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ltconvert.benchmarks.looped_model import HEAD_WIDTH, MAX_POSITIONS, ROPE_THETA
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.selection.simple import uniform_layers
from ltconvert.errors import UserError

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "not decided by these seeds"
# Two-sided 95 % of Student's t by degrees of freedom; more seeds than listed take the last one.
_T95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
LEAST_SEEDS = 3
_WIDTH_STEP = 8  # of MLPs: products over unaligned rows are slow on GPUs


@dataclass(frozen=True)
class Finding:
    """One row of the table of claims: what the paper says, what was seen, where, and a verdict."""

    claim: str
    seen: str
    seeds: str
    verdict: str


def scratch_spec(
    vocab: int, *, layers: int, heads: int, loops: int, mlp: int, head_width: int = HEAD_WIDTH
) -> TeacherSpec:
    """The paper's own decoder: norms before the branches, the final norm after the last loop."""
    return TeacherSpec(
        family="llama",
        vocab_size=vocab,
        hidden_size=heads * head_width,
        intermediate_size=mlp,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_width,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        attention_scale=head_width**-0.5,
        rope={"default": {"rope_type": "default", "rope_theta": ROPE_THETA}},
        layer_rope=("default",) * layers,
        layer_windows=(None,) * layers,
        num_loops=loops,
    )


def ratio_mixers(full: int, linear: int, layers: int) -> list[str]:
    """``full`` layers to every ``linear`` ones, the full ones evenly spaced; Gated DeltaNet else.

    Raises:
        UserError: so many layers do not divide that way.
    """
    if min(full, linear) < 0 or full + linear == 0 or layers * full % (full + linear):
        raise UserError(
            f"{layers} layers do not divide into {full} full to {linear} linear ones; "
            f"give --layers as a multiple of {max(1, full + linear)}"
        )
    kept = layers * full // (full + linear)
    kept_layers = uniform_layers(kept, layers) if kept else []
    return ["full" if layer in kept_layers else "gdn" for layer in range(layers)]


def equal_config(
    sizes: argparse.Namespace,
    vocab: int,
    mixers: Sequence[str],
    loops: int,
    *,
    sdpa_gate: bool = False,
) -> LT2Config:
    """A model as large as one of full attention alone with MLPs of ``sizes.mlp``.

    Mixers differ in size, so the MLPs' width makes up for it, in whole steps of eight.

    Args:
        sizes: with ``layers``, ``heads`` (of 64 channels) and ``mlp``.
    """

    def at(mlp: int, mixers: Sequence[str], gate: bool) -> LT2Config:
        spec = scratch_spec(vocab, layers=sizes.layers, heads=sizes.heads, loops=loops, mlp=mlp)
        return LT2Config.from_spec(spec, mixers, sdpa_gate=gate, loop_residual=loops > 1)

    wanted = model_facts(at(sizes.mlp, ["full"] * sizes.layers, False)).parameters
    spare = wanted - model_facts(at(sizes.mlp, mixers, sdpa_gate)).parameters
    a_width = 3 * sizes.heads * HEAD_WIDTH * sizes.layers  # parameters of one channel in all MLPs
    mlp = sizes.mlp + _WIDTH_STEP * round(spare / (_WIDTH_STEP * a_width))
    if mlp < _WIDTH_STEP:
        raise UserError(f"--mlp {sizes.mlp} leaves no room for the larger mixers; raise it")
    return at(mlp, mixers, sdpa_gate)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its standard error (None with fewer than two values)."""
    if len(values) < 2:
        return (values[0] if values else math.nan), None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """``1.234 ± 0.056``; a dash without values."""
    mean, error = mean_and_error(values)
    if not values:
        return "-"
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def verdict(differences: Sequence[float]) -> str:
    """Whether differences over seeds are above 0: by the 95 % interval of their mean.

    Student's t; undecided where the interval holds 0, or with fewer than three seeds.
    """
    if len(differences) < LEAST_SEEDS:
        return UNDECIDED
    mean, error = mean_and_error(differences)
    assert error is not None
    reach = _T95[min(len(differences) - 1, max(_T95))] * error
    return SEEN if mean - reach > 0 else NOT_SEEN if mean + reach < 0 else UNDECIDED


def compare(
    claim: str, larger: Mapping[int, float], smaller: Mapping[int, float], what: str
) -> Finding:
    """The finding on "``larger`` is larger than ``smaller``", both by seed, compared in pairs."""
    seeds = sorted(larger.keys() & smaller.keys())
    differences = [larger[seed] - smaller[seed] for seed in seeds]
    seen = f"{what}: {shown(differences)}" if seeds else "no pair of finished trials"
    return Finding(claim, seen, ", ".join(map(str, seeds)) or "none", verdict(differences))


def table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def claims_table(findings: Sequence[Finding]) -> list[str]:
    """The table that every script ends with."""
    rows = [list(asdict(finding).values()) for finding in findings]
    return table(["claim", "seen here", "seeds", "verdict"], rows)
