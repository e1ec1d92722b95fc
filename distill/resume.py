"""Checkpoints of a stage in training: written whole, then renamed; a half-written one never counts.

``<stage_dir>/checkpoint`` holds trained parameters and buffers, the optimiser and ``state.json``
(step, position in the data, sizes of the other two files). While the next one is written it is
``checkpoint.tmp``; for the moment between two renames the former one is ``checkpoint.old``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ltconvert.errors import UserError, first_line

CHECKPOINT = "checkpoint"
_STATE, _PARAMETERS, _OPTIMISER = "state.json", "parameters.safetensors", "optimizer.pt"


@dataclass
class TrainState:
    """Where a stage stands.

    Attributes:
        step: finished optimiser steps.
        seconds: training time so far, over all resumes.
        stream: position of the data stream after that step.
        plan: what has to be the same to go on: steps, tokens a step, precision, seed, ...
        metrics: of the last step.
    """

    step: int
    seconds: float
    stream: dict[str, Any]
    plan: dict[str, Any]
    metrics: dict[str, float]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def resumed(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a stage changes in its module: trained parameters, and buffers."""
    return {**trainable(module), **dict(module.named_buffers())}


def save_checkpoint(
    stage_dir: Path, state: TrainState, module: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write a checkpoint; the former one stays until this one is complete."""
    target = stage_dir / CHECKPOINT
    temporary, former = target.with_suffix(".tmp"), target.with_suffix(".old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: p.detach().cpu().contiguous() for name, p in resumed(module).items()}
    save_file(tensors, temporary / _PARAMETERS)
    torch.save(optimizer.state_dict(), temporary / _OPTIMISER)
    sizes = {name: (temporary / name).stat().st_size for name in (_PARAMETERS, _OPTIMISER)}
    (temporary / _STATE).write_text(json.dumps({**asdict(state), "sizes": sizes}, indent=1))
    for path in temporary.iterdir():
        _flush(path)
    if target.exists():
        target.rename(former)
    temporary.rename(target)
    _flush(stage_dir)
    shutil.rmtree(former, ignore_errors=True)
    return target


def clean_up(stage_dir: Path) -> Path | None:
    """Remove what a kill left behind; the complete checkpoint, or None."""
    target = stage_dir / CHECKPOINT
    former = target.with_suffix(".old")
    if not target.exists() and former.exists():
        former.rename(target)
    shutil.rmtree(target.with_suffix(".tmp"), ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)
    return target if target.exists() else None


def load_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Mapping[str, Any],
) -> TrainState:
    """Put parameters and optimiser back in place.

    Raises:
        UserError: the checkpoint is damaged, belongs to another model or to other settings.
    """
    state, sizes = _read_state(folder)
    for name, value in plan.items():
        if state.plan.get(name) != value:
            raise UserError(
                f"{folder} was written with {name} {state.plan.get(name)!r}, this run has "
                f"{value!r}; set it back, or remove {folder.parent} to start the stage again"
            )
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else 0
        if found != size:
            raise _damaged(folder, f"{name} has {found} bytes, expected {size}")
    try:
        tensors = load_file(folder / _PARAMETERS)
        saved = torch.load(folder / _OPTIMISER, map_location="cpu", weights_only=True)
        _copy_parameters(folder, tensors, module)
        optimizer.load_state_dict(saved)
    except UserError:
        raise
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _damaged(folder, first_line(error)) from error
    return state


def _read_state(folder: Path) -> tuple[TrainState, dict[str, int]]:
    try:
        fields = json.loads((folder / _STATE).read_text())
        sizes = fields.pop("sizes")
        return TrainState(**fields), sizes
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(folder, f"{_STATE}: {error}") from error


def _copy_parameters(folder: Path, tensors: Mapping[str, torch.Tensor], module: nn.Module) -> None:
    parameters = resumed(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise UserError(
                f"{folder} does not fit this model: {name} is {shapes.get(name)} in the "
                f"checkpoint, {expected.get(name)} here; remove {folder.parent} to start again"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _damaged(folder: Path, reason: str) -> UserError:
    return UserError(
        f"checkpoint {folder} is damaged ({reason}); "
        f"remove {folder.parent} to start the stage again"
    )


def _flush(path: Path) -> None:
    """Ask the disk to hold it, so that not even a power cut leaves a renamed but empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
