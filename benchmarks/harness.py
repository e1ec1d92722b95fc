"""One benchmark case measured: parity first, then ours, floor and peers in the same process."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import Case, Function, Inputs, Options, Peer, parity
from ltconvert.benchmarks.rows import PeerTime, Row
from ltconvert.kernels import dispatch
from ltconvert.kernels.parity import Verdict

ALIKE = 3e-2  # a peer that is further from ours than this computes something else


def measure(case: Case, options: Options) -> Iterator[Row]:
    """A row a phase, each as soon as it is there; whatever fails becomes a row that says so."""
    rows = [Row(case.op, case.shape, x, target=case.targets.get(x)) for x in case.phases]
    try:
        run = _Run(case, options)
        red = run.prepare(rows)
        for row in rows:
            if not red:
                run.measure(row)
            yield row
    except Exception as error:
        for row in rows:
            if row.ms is None and not row.parity_red:
                row.failed = reason(error)
                yield row
    finally:
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    """An error in a few words on one line, fit for a cell of a table."""
    if isinstance(error, ModuleNotFoundError):
        name = error.name or "a package"
        return f"no {name}" if name.startswith("ltconvert.") else f"{name} is not installed"
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".replace("|", "/")
    return text if len(text) <= 120 else text[:117] + "..."


class _Run:
    """Inputs of a case and the functions that are alive for it."""

    def __init__(self, case: Case, options: Options) -> None:
        self.case, self.options, self.device = case, options, options.device
        self.sets = [self._leaves(case.make(seed)) for seed in range(case.sets)]
        self.loaded: dict[str, Function | str] = {}
        self.floors: Mapping[str, float] = {}
        self.result: Tensor | None = None
        self.upstream: Tensor | None = None

    def prepare(self, rows: list[Row]) -> bool:
        """First calls, parity and floors; True when parity is red."""
        case, inputs = self.case, self.sets[0]
        backend = self.options.backend
        with dispatch.use(backend):
            result, seconds = timing.once_s(partial(case.ours, **inputs), self.device)
            self.result, rows[0].first_s = _first(result).detach(), seconds
            if case.grads:
                call = partial(self._grad, _first(result))
                rows[min(1, len(rows) - 1)].first_s = timing.once_s(call, self.device)[1]
                if len(rows) == 1:
                    rows[0].first_s += seconds
        del result
        verdicts = parity(case, inputs, backend)
        red = [verdict for verdict in verdicts if not verdict.ok]
        worst = max(verdicts, key=lambda x: x.kernel_error - x.plain_error)
        for row in rows:
            row.parity = _red(red) if red else f"ok {worst.kernel_error:.0e}"
            row.backend, row.parity_red = backend, bool(red)
        if not red:
            self.floors = case.floor(inputs) if case.floor else self._copies(inputs)
        return bool(red)

    def measure(self, row: Row) -> None:
        """Ours and then every peer, for one phase."""
        with dispatch.use(self.options.backend):
            row.ms, row.peak_gib = self._time(self.case.ours, row.phase, memory=True)
        row.floor_ms, row.floor = self.floors.get(row.phase), self.case.floor_name
        _say(f"  {row.shape}, {row.phase}: ours {row.ms:.3g} ms")
        if not self.options.peers:
            return
        for name, peer in self.case.peers.items():
            found = row.peers[name] = self._time_peer(name, peer, row.phase)
            _say(f"    {name} {found.note if found.ms is None else f'{found.ms:.3g} ms'}")

    def _time_peer(self, name: str, peer: Peer, phase: str) -> PeerTime:
        left = min(self.options.peer_seconds, self.options.until - time.time())
        if left <= 0:
            return PeerTime(note="no time left")
        try:
            with timing.deadline(left):
                if name not in self.loaded:
                    self.loaded[name] = self._load(peer)
                function = self.loaded[name]
                if isinstance(function, str):
                    return PeerTime(note=function)
                ms, peak = self._time(function, phase, memory=self.case.peer_memory)
                return PeerTime(ms, peak)
        except timing.TimeLimit as limit:
            self.loaded[name] = str(limit)
            return PeerTime(note=str(limit))
        except Exception as error:
            self.loaded.setdefault(name, reason(error))
            return PeerTime(note=reason(error))

    def _load(self, peer: Peer) -> Function | str:
        """The peer's function, or why it is no peer: its result is not ours."""
        function = peer.load()
        if not peer.same_result:
            return function
        ours = self.result
        assert ours is not None
        with torch.no_grad():
            theirs = _first(function(**self.sets[0]))
        if theirs.shape != ours.shape:
            return f"other result: {list(theirs.shape)}"
        error = float((theirs - ours).float().norm() / ours.float().norm())
        return function if error <= ALIKE else f"other result: {error:.1e} from ours"

    def _time(self, function: Function, phase: str, *, memory: bool) -> tuple[float, float | None]:
        calls = [partial(function, **inputs) for inputs in self.sets]
        if phase == "eager":
            return timing.round_ms(calls, self.device), None
        if phase == "graph":
            return timing.graph_ms(calls, self.device), None
        call: timing.Call = calls[0]
        if phase == "bwd":
            call = partial(self._grad, _first(call()))
        elif phase == "fwd+bwd":
            call = partial(self._both, call)
        peak = timing.peak_gib(call, self.device) if memory and phase != "bwd" else None
        return timing.median_ms(call, self.device, self.options.rep_ms), peak

    def _both(self, forward: Function) -> tuple[Tensor, ...]:
        return self._grad(_first(forward()), retain=False)

    def _grad(self, result: Tensor, retain: bool = True) -> tuple[Tensor, ...]:
        leaves = [self.sets[0][name] for name in self.case.grads]
        upstream = torch.ones_like(result) if result.dim() == 0 else self._upstream(result)
        with torch.autograd.set_multithreading_enabled(False):  # for `timing.deadline`
            return torch.autograd.grad(
                result, leaves, upstream, retain_graph=retain, allow_unused=True
            )  # a peer may do only a part

    def _upstream(self, result: Tensor) -> Tensor:
        """The same random gradient for everyone; made once, so that no clock sees it."""
        if self.upstream is None:
            self.upstream = torch.randn_like(result)
        return self.upstream

    def _copies(self, inputs: Inputs) -> dict[str, float]:
        """Copies of what has to be read and written."""
        size = {name: _bytes(tensor) for name, tensor in inputs.items()}
        with dispatch.use(self.options.backend), torch.no_grad():
            results = self.case.ours(**inputs)
        results = results if isinstance(results, tuple) else (results,)
        forward = sum(size.values()) + sum(map(_bytes, results))
        backward = sum(size.values()) + _bytes(results[0]) + sum(size[x] for x in self.case.grads)
        moved = {"bwd": backward, "fwd+bwd": forward + backward}
        return {x: timing.copy_ms(moved.get(x, forward), self.device) for x in self.case.phases}

    def _leaves(self, inputs: Inputs) -> Inputs:
        for name in self.case.grads:
            inputs[name].requires_grad_()
        return inputs


def _red(red: list[Verdict]) -> str:
    """The worst of them in full, the others by name."""
    worst = max(red, key=lambda x: x.kernel_error - x.plain_error)
    others = [verdict.name for verdict in red if verdict is not worst]
    return f"{worst}" + (f"; also {', '.join(others)}" if others else "")


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
