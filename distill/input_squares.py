"""What the matrices of a dense teacher read: second moments of their inputs.

B rows, T tokens, I input channels, N tokens that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.calibrate import run_teacher
from ltconvert.distill.data import Batch

# Matrices of a layer by the one of them whose input is looked at: they read the same.
_READERS = {
    "mixer.q_proj": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "mixer.o_proj": ("mixer.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


@torch.no_grad()
def input_squares(
    teacher: LT2ForCausalLM, batches: Iterable[Batch], layers: Iterable[int]
) -> dict[str, Tensor]:
    """Mean of ``x x^T`` over all kept tokens, [I, I] in fp64, by the name of the matrix's tensor.

    Takes 8 bytes for ``3 C^2 + F^2`` values a layer of width C and MLP width F.
    """
    sums: dict[str, Tensor] = {}
    keep_BT, count = torch.zeros(0), 0

    def listen(linear: nn.Module, name: str) -> None:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x_NI = inputs[0][keep_BT].double()
            sums[name] = sums.get(name, 0.0) + x_NI.mT @ x_NI

        stack.callback(linear.register_forward_pre_hook(add).remove)

    with ExitStack() as stack:
        stems = {layer: f"model.layers.{layer}" for layer in layers}
        for stem in stems.values():
            for read in _READERS:
                listen(teacher.get_submodule(f"{stem}.{read}"), f"{stem}.{read}")
        for batch in batches:
            batch = batch.to(teacher.device)
            keep_BT = batch.keep_BT
            count += int(keep_BT.sum())
            run_teacher(teacher, batch, len(teacher.model.schedule))
    return {
        f"{stem}.{reader}.weight": sums[f"{stem}.{read}"] / count
        for stem in stems.values()
        for read, readers in _READERS.items()
        for reader in readers
    }
