"""Mixers that wait for their turn lie on disk, so that only those at work take up memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ltconvert.convert.students.lt2 import LT2ForCausalLM


class Parking:
    """Takes mixers of a student out of memory and brings them back, bit for bit.

    Args:
        folder: for the files; scratch, emptied here and by ``close``.
        device: where mixers come back to.
    """

    def __init__(self, student: LT2ForCausalLM, folder: Path, device: torch.device) -> None:
        self._student, self._folder, self._device = student, folder, device
        self._parked: set[int] = set()
        shutil.rmtree(folder, ignore_errors=True)

    def leave(self, layers: Iterable[int]) -> None:
        """Put the mixers of physical layers on disk; their parameters become empty (meta)."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for layer in set(layers) - self._parked:
            mixer = self._student.model.layers[layer].mixer
            tensors = {name: x.detach().cpu() for name, x in mixer.state_dict().items()}
            save_file(tensors, self._file(layer))
            mixer.to("meta")
            self._parked.add(layer)

    def fetch(self, layers: Iterable[int]) -> None:
        """Bring mixers back."""
        for layer in set(layers) & self._parked:
            tensors = load_file(self._file(layer), device=str(self._device))
            self._student.model.layers[layer].mixer.load_state_dict(tensors, assign=True)
            self._file(layer).unlink()
            self._parked.discard(layer)

    def close(self) -> None:
        """Bring all back and remove the folder."""
        self.fetch(list(self._parked))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer_{layer}.safetensors"
