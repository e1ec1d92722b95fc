"""What a looped teacher is trained on: the next token, after every loop.

B rows, T tokens, N of all rows, C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.students.blocks import run_layer
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.objective import Wrap
from ltconvert.kernels.linear_kl import linear_kl


class LoopedObjective:
    """Cross-entropy of the next token after every loop, their mean; or after the last one alone.

    Args:
        model: trained whole but for its exit gate, where it has one: that enters no logits.
    """

    def __init__(self, model: LT2ForCausalLM, lr: float, *, every_loop: bool = True) -> None:
        self.module, self._lr, self._every_loop = model.train().requires_grad_(True), lr, every_loop
        if (gate := model.model.exit_gate) is not None:
            gate.requires_grad_(False)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """One group."""
        params = [p for p in self.module.parameters() if p.requires_grad]
        return [{"name": "all", "params": params, "lr": self._lr}]

    def compile_with(self, wrap: Wrap) -> None:
        """The layers."""
        self.module.model.call_layer = wrap(run_layer)

    def work(self, progress: float) -> Hashable | None:
        """The same in all steps."""
        return ()

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """``loss``, and ``ce<t>`` after loop t, in nats a token."""
        output = self.module.model(
            batch.input_ids_BT,
            attention_mask=batch.mask_BT,
            segment_ids=batch.segment_ids_BT,
            use_cache=False,
        )
        first = 0 if self._every_loop else len(output.loop_states) - 1
        losses = {
            f"ce{loop + 1}": self._cross_entropy(h_BTC, batch.labels_BT)
            for loop, h_BTC in enumerate(output.loop_states)
            if loop >= first
        }
        loss = torch.stack(list(losses.values())).mean()
        backward(loss)
        return {"loss": loss.detach()} | {name: ce.detach() for name, ce in losses.items()}

    def _cross_entropy(self, h_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        """Mean over labelled tokens; logits a chunk at a time.

        It is the divergence from a teacher that is sure of the label: a top-k of one token.
        """
        labels_N = labels_BT.flatten()
        label_N1 = labels_N.clamp(min=0)[:, None]
        log_p_N1 = torch.zeros_like(label_N1, dtype=torch.float32)
        return linear_kl(
            h_BTC.flatten(0, 1),
            self.module.head_weight,
            teacher_topk=(label_N1, log_p_N1),
            mask_N=labels_N >= 0,
        ).loss
