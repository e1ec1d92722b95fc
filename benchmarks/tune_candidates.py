"""What `tune_decode.py` tries: constants by name, and the cases that they are tried on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ltconvert.benchmarks.case import Case, Scale

Constants = Mapping[str, Any]  # "decode_linear.AHEAD" -> 2

# By op the groups of cases that share constants; beginnings of their shapes, those of Ouro-1.4B.
SHAPES: dict[str, list[tuple[str, ...]]] = {
    "decode_linear": [("1x",), ("8x",)],
    "gdn_step": [("1x", "8x")],
    "gdn_window_step": [("1x16x", "8x16x128x")],
    "decode_attention": [("1x16/16x8192x", "8x16/16x4096x")],
}
MOVED = {"weight": 1, "state": 2}  # inputs and how often, beside keys and values


@dataclass(frozen=True)
class Group:
    """Cases that share constants, and the constants to try on all of them."""

    name: str
    cases: list[Case]
    candidates: list[dict[str, Any]]

    def score(self, times: list[float], before: list[float]) -> float:
        """Times over those before: summed within a batch, as a step has all of them; the mean of
        batches."""
        batches: dict[str, list[int]] = {}
        for index, case in enumerate(self.cases):
            batches.setdefault(case.shape.split("x")[0], []).append(index)
        sums = [(sum(times[i] for i in x), sum(before[i] for i in x)) for x in batches.values()]
        return sum(now / then for now, then in sums) / len(sums)


def groups(ops: list[str], device: torch.device) -> list[Group]:
    """The groups of some ops, on a CPU with toy shapes; the present constants come first."""
    found = []
    scale: Scale = "full" if device.type == "cuda" else "tiny"
    for op in ops:
        module = importlib.import_module(f"ltconvert.benchmarks.cases.{op}")
        cases = module.cases(scale, device)
        for starts in SHAPES[op] if scale == "full" else [("",)]:
            mine = [case for case in cases if case.shape.startswith(starts)]
            name = f"{op}, several rows" if starts == ("8x",) else op
            named = [{f"{op}.{k}": value for k, value in x.items()} for x in CANDIDATES[name]]
            found.append(Group(name, mine, [{}, *named]))
    return found


def _single(outputs: int, row_bytes: int, ahead: int, warps: int, **more: Any) -> dict[str, Any]:
    return {
        "OUTPUTS": (outputs,), "ROW_BYTES": row_bytes, "AHEAD": ahead, "WARPS": warps, **more,
    }  # fmt: skip


def _several(outputs: int, block: int, stages: int, warps: int, **more: Any) -> dict[str, Any]:
    return {
        "WIDE_OUTPUTS": (outputs,), "BLOCK_BYTES": block, "STAGES": stages, "WIDE_WARPS": warps,
        **more,
    }  # fmt: skip


def _warps(single: int, several: int, **others: int) -> dict[str, Any]:
    return {"WARPS": {"single": single, "several": several, **others}}


def _apart(single: bool, several: bool) -> dict[str, Any]:
    return {"APART": {"single": single, "several": several}}


CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "decode_linear": [
        {"FETCH": True}, _single(4, 2048, 2, 4), _single(4, 4096, 1, 4), _single(4, 4096, 2, 8),
        _single(8, 4096, 1, 8), _single(8, 4096, 2, 8), _single(8, 2048, 2, 4),
        _single(16, 4096, 1, 8), _single(2, 2048, 4, 4), _single(2, 4096, 2, 4),
        _single(1, 2048, 6, 4), _single(8, 4096, 1, 8, FETCH=True), _single(2, 1024, 4, 2),
    ],
    "decode_linear, several rows": [
        {"WIDE_FETCH": False}, _several(32, 8192, 3, 4), _several(64, 8192, 4, 4),
        _several(64, 16384, 3, 8), _several(16, 8192, 5, 4), _several(32, 16384, 4, 4),
        _several(32, 16384, 3, 8), _several(16, 16384, 3, 4),
    ],
    "gdn_step": [
        {"REGISTERS": 96}, {"REGISTERS": 64}, _warps(8, 16), _warps(16, 16), _warps(4, 8),
        {"TILE": 8192}, {"TILE": 8192, "ELEMENTS": 64}, {"TILE": 4096},
    ],
    "gdn_window_step": [
        _apart(False, False), _apart(True, True), _warps(8, 16, apart=8), _warps(8, 16, apart=16),
        {**_apart(True, True), **_warps(8, 16, apart=8)},
        {**_apart(False, False), **_warps(16, 16, apart=4)}, _warps(8, 8, apart=4),
        {"SHARE": 4}, {**_warps(8, 16, apart=8), "SHARE": 4}, {"AHEAD_BYTES": 2**14}, {"STAGES": 4},
        {"TILE": 8192, "ELEMENTS": 64}, {"SHARE": 4, "STAGES": 5},
    ],
    "decode_attention": [
        {"FETCHED": 0}, {"FETCHED": 128}, {"STAGES": 2}, {"STAGES": 4}, {"TILE": 2048, "STAGES": 5},
        {"TILE": 8192, "STAGES": 2}, {"RESIDENT": {"single": 6, "grouped": 2}},
        {"RESIDENT": {"single": 3, "grouped": 2}}, {"TOGETHER": 8192}, {"TOGETHER": 2048},
    ],
}  # fmt: skip


def module_of(name: str) -> tuple[ModuleType, str]:
    """The module and attribute of a constant such as ``decode_linear.AHEAD``.

    Raises:
        ValueError: there is no such constant.
    """
    place, _, key = name.partition(".")
    path = f"ltconvert.kernels.{place}" + ("" if place == "overlap" else ".triton")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError:
        raise ValueError(f"{name}: there is no module {path}") from None
    if not hasattr(module, key):
        raise ValueError(f"{name}: {path} has no {key}")
    return module, key


@contextmanager
def applied(constants: Constants) -> Iterator[None]:
    """Constants in place of those of the modules, plans made anew."""
    before = []
    try:
        for name, value in constants.items():
            module, key = module_of(name)
            before.append((module, key, getattr(module, key)))
            setattr(module, key, value)
            _forget(module)
        yield
    finally:
        for module, key, value in reversed(before):
            setattr(module, key, value)
            _forget(module)


def _forget(module: ModuleType) -> None:
    for value in vars(module).values():
        if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == module.__name__:
            value.cache_clear()


def moved_bytes(inputs: Mapping[str, Tensor]) -> int:
    """What a call cannot but move: the weight, the state twice, the filled keys and values."""
    moved = sum(inputs[name].nbytes * times for name, times in MOVED.items() if name in inputs)
    if "k" not in inputs:
        return moved
    used = int(inputs["lengths"].max()) / inputs["k"].shape[2]
    return moved + round(used * (inputs["k"].nbytes + inputs["v"].nbytes))


def text_of(constants: Constants) -> str:
    """Constants on one line, as ``--set`` takes them."""
    return " ".join(f"--set '{name}={value!r}'" for name, value in constants.items()) or "as it is"
