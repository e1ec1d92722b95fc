"""A checkpoint folder in the published layout: config, tensors by canonical name, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.teachers.family import Config
from ltconvert.convert.teachers.registry import family_of
from ltconvert.errors import UserError

_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: the file is absent or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = ""
        if (path.parent / "student" / path.name).is_file():  # the folder of a run
            hint = f"; {path.parent / 'student'} is one"
        message = f"{path.parent} is no model folder: {path.name} is missing{hint}"
        raise UserError(message) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): get it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def read_config(folder: Path) -> Config:
    """config.json, with the special ids of generation_config.json where that has them."""
    config = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
        config.update({k: generation[k] for k in _ID_KEYS if generation.get(k) is not None})
    return config


def tensors(folder: Path, config: Config) -> Iterator[tuple[str, Tensor]]:
    """``(canonical name, tensor in the stored dtype)`` of every stored tensor, one at a time.

    Raises:
        UserError: no weights, a missing or broken file, a tensor that the family does not have.
    """
    family = family_of(config)
    for path in weight_files(folder):
        for published, value in _read_file(path):
            yield from family.read(config, published, value)


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: safetensors, sharded or not, else PyTorch's own format.

    Raises:
        UserError: there are none, or a shard is missing.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing or not names:
                what = f"{len(missing)} of {len(names)} weight files, first {missing[:1]}"
                raise UserError(f"{folder} lacks {what}: the download is not complete")
            return [folder / name for name in names]
        if (folder / stem).is_file():
            return [folder / stem]
    raise UserError(
        f"{folder} has no weights (model.safetensors or pytorch_model.bin, sharded or not)"
    )


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.suffix == ".safetensors":
        yield from _read_safetensors(path)
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and runtime errors alike
        raise UserError(f"{path} is broken or incomplete: get it again") from error
    yield from state.items()


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise UserError(f"{path} is broken or incomplete ({error}): get it again") from error
