"""Pure losses of tensors. Everything is in fp32 whatever the inputs are.

Shape letters: B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from torch import Tensor


def contribution_loss(student_BTC: Tensor, teacher_BTC: Tensor, keep_BT: Tensor | None) -> Tensor:
    """Squared error of a mixer's contribution to the residual stream over the target's mean square.

    ``sum_kept |t - s|^2 / sum_kept |t|^2``: 0 is a perfect copy, 1 is as good as a mixer that
    returns nothing, and layers whose contributions differ in size by orders of magnitude weigh the
    same. The published alternative (fla-org/hybrid-distillation) is ``mean_kept |t - s|_2 /
    sqrt(C)``: its gradient keeps its length however close the student comes, and layers weigh as
    much as they are large.

    Args:
        student_BTC, teacher_BTC: what each adds to the residual stream; the teacher's is a target.
        keep_BT: False at padding, which counts in neither sum; None: there is none.

    Returns:
        A scalar, fp32; 0 when no token is kept or the target is zero everywhere and met.
    """
    target, guess = teacher_BTC.detach().float(), student_BTC.float()
    if keep_BT is not None:
        padding_BT1 = ~keep_BT.unsqueeze(-1)
        target, guess = target.masked_fill(padding_BT1, 0.0), guess.masked_fill(padding_BT1, 0.0)
    error = guess - target
    # The floor only matters for an all-zero target (an empty batch, a layer that adds nothing).
    scale = target.square().sum().clamp_min(1e-12)
    return error.square().sum() / scale


def kept_squares(x_BTC: Tensor, keep_BT: Tensor) -> Tensor:
    """Sum over kept tokens of the squares of every channel, [C], fp32.

    A sum and not yet a root mean square, so that batches and loops add up exactly.
    """
    kept = x_BTC.detach().float().masked_fill(~keep_BT.unsqueeze(-1), 0.0)
    return kept.square().flatten(0, 1).sum(0)
