"""What decoding costs in quality when loops are left early or share a cache.

Both are ways of decoding the same model, so it is compared with itself: held-out text is read as a
prompt, then token by token, once in the ordinary way and once in the other.

Shape letters: B rows, T tokens, P of the prompt, N decoded ones, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.students.exits import leaving
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.shared_cache import owners
from ltconvert.distill.evaluation.generation import cache_bytes, deployed
from ltconvert.distill.evaluation.statistics import ratio
from ltconvert.errors import UserError


@dataclass(frozen=True)
class Way:
    """One way of decoding a looped model; the ordinary one by default."""

    loop_cache: str = "own"
    exit_threshold: float | None = None

    def check(self, model: LT2ForCausalLM) -> None:
        """Refuse what the model cannot do.

        Raises:
            UserError: no exit gate, or no keys that loops could share.
        """
        leaving(model.model, self.exit_threshold)
        owners(model.config, self.loop_cache)

    def fits(self, model: LT2ForCausalLM) -> bool:
        """Whether the model can."""
        try:
            self.check(model)
        except UserError:
            return False
        return True


def ways(loop_cache: str, exit_thresholds: Sequence[float]) -> list[Way]:
    """All that the settings ask for, each alone, and the cache with each threshold."""
    found = [Way(exit_threshold=threshold) for threshold in exit_thresholds]
    if loop_cache != "own":
        found += [Way(loop_cache), *(Way(loop_cache, x) for x in exit_thresholds)]
    return found


@torch.inference_mode()
def loop_decoding(
    model: LT2ForCausalLM,
    texts_BT: Tensor,
    prompt_tokens: int,
    asked: Sequence[Way],
    *,
    precision: str = "fp32",
) -> list[dict[str, Any]]:
    """One row a way: how far its distributions are from those of ordinary decoding.

    Rows are decoded one at a time, since a batch leaves its loops together.

    Returns:
        ``loop_cache``, ``exit_threshold``, ``kl`` = KL(ordinary || this way) in nats a token,
        ``agreement`` (share of tokens with the same likeliest successor), each with
        ``<name>_stderr`` over rows, ``ppl`` and ``plain_ppl`` of the text, ``loops`` computed a
        token, ``cache_bytes`` and ``plain_cache_bytes`` of a row at its end, ``rows``, ``tokens``.
    """
    model = deployed(model, precision)
    texts = [text_T[None].to(model.device) for text_T in texts_BT]
    plain = [_decoded(model, text_1T, prompt_tokens, Way()) for text_1T in texts]
    rows = []
    for way in asked:
        found = [_decoded(model, text_1T, prompt_tokens, way) for text_1T in texts]
        rows.append(
            {"loop_cache": way.loop_cache, "exit_threshold": way.exit_threshold}
            | _compared(plain, found, [text_1T[0, prompt_tokens + 1 :] for text_1T in texts])
        )
    return rows


@dataclass(frozen=True)
class _Decoded:
    """Log-probabilities behind each decoded token [N, V], loops of all, bytes at the end."""

    log_probs_NV: Tensor
    loops: int
    cache_bytes: int


def _decoded(model: LT2ForCausalLM, text_1T: Tensor, prompt_tokens: int, way: Way) -> _Decoded:
    """Read the prompt, then every token but the last one, of which nothing is known to follow."""
    cache = model.new_cache(way.loop_cache)
    model(text_1T[:, :prompt_tokens], cache=cache, logits_to_keep=1)
    logits, loops = [], 0
    for token_11 in text_1T[:, prompt_tokens:-1].split(1, dim=1):
        output = model(token_11, cache=cache, exit_threshold=way.exit_threshold)
        assert output.loop_states is not None and output.logits is not None
        loops += len(output.loop_states)
        logits.append(output.logits[0, 0])
    log_probs_NV = torch.stack(logits).double().log_softmax(-1)
    return _Decoded(log_probs_NV, loops, cache_bytes(cache))


def _compared(
    plain: Sequence[_Decoded], found: Sequence[_Decoded], labels: Sequence[Tensor]
) -> dict[str, Any]:
    counts_B = torch.tensor([len(labels_N) for labels_N in labels])
    sums: dict[str, list[Tensor]] = {"kl": [], "agreement": [], "nll": [], "plain_nll": []}
    for before, after, labels_N in zip(plain, found, labels, strict=True):
        p_NV, q_NV = before.log_probs_NV, after.log_probs_NV
        sums["kl"].append((p_NV.exp() * (p_NV - q_NV)).sum())
        sums["agreement"].append((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
        sums["nll"].append(F.nll_loss(q_NV, labels_N, reduction="sum"))
        sums["plain_nll"].append(F.nll_loss(p_NV, labels_N, reduction="sum"))
    means = {name: ratio(torch.stack(x).cpu(), counts_B) for name, x in sums.items()}
    scores: dict[str, Any] = {}
    for name in ("kl", "agreement"):
        scores[name], scores[f"{name}_stderr"] = means[name]
    tokens = int(counts_B.sum())
    return scores | {
        "ppl": math.exp(min(means["nll"][0], 700.0)),
        "plain_ppl": math.exp(min(means["plain_nll"][0], 700.0)),
        "loops": sum(x.loops for x in found) / tokens,
        "cache_bytes": found[0].cache_bytes,
        "plain_cache_bytes": plain[0].cache_bytes,
        "rows": len(plain),
        "tokens": tokens,
    }
