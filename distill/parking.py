"""Mixers that wait for their turn lie on disk, so that only those at work take up memory.

They are the same in all processes of a run: the first one writes, all read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.processes import is_main_process, wait_for_everyone


class Parking:
    """Takes mixers of a student out of memory and brings them back, bit for bit.

    Processes call the same methods in the same order.

    Args:
        folder: for the files; scratch, emptied here and by ``close``.
        device: where mixers come back to.
    """

    def __init__(self, student: LT2ForCausalLM, folder: Path, device: torch.device) -> None:
        self._student, self._folder, self._device = student, folder, device
        self._parked: set[int] = set()
        self._remove()

    def leave(self, layers: Iterable[int]) -> None:
        """Put the mixers of physical layers on disk; their parameters become empty (meta)."""
        for layer in set(layers) - self._parked:
            mixer = self._student.model.layers[layer].mixer
            if is_main_process():
                self._folder.mkdir(parents=True, exist_ok=True)
                tensors = {name: x.detach().cpu() for name, x in mixer.state_dict().items()}
                save_file(tensors, self._file(layer))
            mixer.to("meta")
            self._parked.add(layer)

    def fetch(self, layers: Iterable[int]) -> None:
        """Bring mixers back."""
        wanted = set(layers) & self._parked
        wait_for_everyone()  # they are written
        for layer in wanted:
            tensors = load_file(self._file(layer), device=str(self._device))
            self._student.model.layers[layer].mixer.load_state_dict(tensors, assign=True)
        wait_for_everyone()  # they are read
        for layer in wanted if is_main_process() else ():
            self._file(layer).unlink()
        self._parked -= wanted

    def close(self) -> None:
        """Bring all back and remove the folder."""
        self.fetch(list(self._parked))
        self._remove()

    def _remove(self) -> None:
        if is_main_process():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer_{layer}.safetensors"
