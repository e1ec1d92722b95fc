"""When decode kernels may begin early. That they are right then shows on a GPU that lets them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ltconvert.kernels import dispatch, overlap
from ltconvert.kernels.decode_attention import decode_self_attention
from ltconvert.kernels.decode_linear import decode_linear
from ltconvert.kernels.decode_norm import decode_norm
from ltconvert.kernels.gdn_window_step import Ring, gdn_window_step

GPU = torch.device("cuda", 0)
EARLY, IN_TURN = {"OVERLAP": True, "launch_pdl": True}, {"OVERLAP": False}

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_able", lambda index: True)


def test_early_inside_alone(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap.options(GPU) == IN_TURN
    with pytest.raises(ZeroDivisionError), overlap.overlapping():
        with overlap.overlapping():
            assert overlap.options(GPU) == EARLY
        assert overlap.options(GPU) == EARLY
        assert overlap.options(torch.device("cpu")) == IN_TURN
        monkeypatch.setattr(overlap, "ALLOWED", False)
        assert overlap.options(GPU) == IN_TURN
        monkeypatch.setattr(overlap, "ALLOWED", True)
        _ = 1 / 0
    assert overlap.options(GPU) == IN_TURN


def test_what_is_copied_just_before_is_not_read_early(hopper: None) -> None:
    weight = torch.zeros(4, 6)
    with overlap.overlapping():
        assert overlap.options(GPU, weight, None) == EARLY
        assert overlap.options(GPU, None, weight.mT) == IN_TURN


@needs_triton
@pytest.mark.parametrize(
    ("capability", "hip", "able"),
    [((9, 0), None, True), ((12, 1), None, True), ((8, 9), None, False), ((9, 4), "6.4", False)],
)
def test_gpus_that_can(
    capability: tuple[int, int], hip: str | None, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert overlap._able.__wrapped__(0) == able


class Chain:
    """Layers as a step runs them: each of the ops, with the next one reading what it has written.

    B rows, C width, H heads of D, S slots of a cache, W of a window, I channels between.
    """

    B, H, D, S, W, inner, layers = 1, 4, 64, 700, 96, 704, 6

    def __init__(self, rows: int) -> None:
        self.B = rows
        self.generator = torch.Generator("cuda").manual_seed(3)
        width, heads = self.H * self.D, 3 * self.H * self.D
        self.x = self.draw(rows, width)
        self.lengths = torch.full((rows,), self.S - 20, device="cuda")
        self.outside = torch.ones(rows, dtype=torch.bool, device="cuda")
        self.arrivals = torch.zeros(rows, self.H, dtype=torch.int32, device="cuda")
        self.made = [self.layer(width, heads) for _ in range(self.layers)]

    def draw(self, *shape: int, scale: float = 1.0, dtype: Any = torch.bfloat16) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device="cuda") * scale
        return x.to(dtype)

    def layer(self, width: int, heads: int) -> dict[str, Tensor]:
        fp32 = {"dtype": torch.float32}
        cache = (2, self.B, self.H, self.S, self.D)
        return {
            "qkv": self.draw(heads + width + 3 * self.H, width, scale=width**-0.5),
            "norm": self.draw(width),
            "rate": self.draw(2, self.H, **fp32),
            "state": self.draw(self.B, self.H, self.D, self.D, **fp32),
            "history": self.draw(self.B, heads, 3),
            "taps": self.draw(heads, 4, scale=0.5),
            "gain": self.draw(self.H, self.D, **fp32),
            "cache": self.draw(*cache),
            "window": self.draw(2, self.B, self.H, self.W, self.D),
            "out": self.draw(width, width, scale=width**-0.5),
            "up": self.draw(2 * self.inner, width, scale=width**-0.5),
            "down": self.draw(width, self.inner, scale=self.inner**-0.5),
        }

    def step(self) -> Tensor:
        """Output [B, C]; states, histories and caches move on."""
        slots = {size: self.lengths % size for size in (self.S, self.W)}
        used = {size: (self.lengths + 1).clamp(max=size) for size in (self.S, self.W)}
        h = self.x * 1.0  # not a decode op: what stands before it has ended
        with overlap.overlapping():
            for index, layer in enumerate(self.made):
                h = self.visit(h, layer, index % 2 == 0, slots, used)
        self.lengths += 1
        return h

    def visit(
        self,
        h: Tensor,
        layer: dict[str, Tensor],
        linear: bool,
        slots: dict[int, Tensor],
        used: dict[int, Tensor],
    ) -> Tensor:
        width = self.H * self.D
        y = decode_linear(h, layer["qkv"], norm_weight_C=layer["norm"])
        qkv, gate, beta, decay, rest = y.split([3 * width, width, *(self.H,) * 3], dim=1)
        keys, values = (layer["window"] if linear else layer["cache"]).unbind(0)
        size, scale = keys.shape[2], self.D**-0.5
        if linear:
            ring = Ring(
                keys, values, slots[size], used[size], self.outside, rest, scale=scale,
                arrivals_BH=self.arrivals,
            )  # fmt: skip
            o = gdn_window_step(
                ring, qkv, beta, decay, *layer["rate"], layer["state"], layer["gain"],
                gate.unflatten(1, (self.H, self.D)), eps=1e-5, conv_weight_CW=layer["taps"],
                conv_history_BCP=layer["history"],
            )  # fmt: skip
        else:
            o = decode_self_attention(
                qkv, keys, values, slots[size], used[size],
                num_heads=self.H, scale=scale, arrivals_BH=self.arrivals,
            )  # fmt: skip
        y = decode_linear(o.flatten(1), layer["out"])
        h = decode_norm(y, layer["norm"], h, eps=1e-5)
        m = decode_linear(h, layer["up"], norm_weight_C=layer["norm"], swiglu=True)
        return decode_linear(m, layer["down"], residual_BO=h)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("graph", [False, True])
def test_early_kernels_give_what_kernels_in_turn_give(
    rows: int, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not overlap._able(0):
        pytest.skip("needs an NVIDIA GPU from Hopper on")
    steps, first = 16, []
    with dispatch.use("triton"), torch.no_grad():
        monkeypatch.setattr(overlap, "ALLOWED", False)
        chain = Chain(rows)
        want = [chain.step().float() for _ in range(steps)]
        monkeypatch.setattr(overlap, "ALLOWED", True)
        chain.step()  # compiled before it is captured
        for _ in range(5):
            chain = Chain(rows)
            torch.cuda.synchronize()
            run = _captured(chain) if graph else chain.step
            found = [run().clone() for _ in range(steps)]
            first = first or found
            for step in range(steps):
                assert torch.equal(found[step], first[step]), step
                error = (found[step].float() - want[step]).norm() / want[step].norm()
                assert error < 1e-2, (step, error)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("early", [True, False])
def test_a_graph_keeps_early_starts(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not overlap._able(0):
        pytest.skip("needs an NVIDIA GPU from Hopper on")
    monkeypatch.setattr(overlap, "ALLOWED", early)
    with dispatch.use("triton"), torch.no_grad():
        chain = Chain(1)
        chain.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            chain.step()
    # Of a layer: qkv, attention or recurrence and window, out, norm, up, down.
    found, most = _programmatic_edges(graph), 6 * chain.layers
    assert most - 1 <= found <= most if early else not found, found  # the first may differ


def _programmatic_edges(graph: torch.cuda.CUDAGraph) -> int:
    """Dependencies of a graph that are of type CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""
    count = ctypes.c_size_t(4096)  # room for; then how many there are
    ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
    data = ((ctypes.c_uint8 * 8) * count.value)()  # ports, type, nothing
    call = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    status = call(ctypes.c_void_p(graph.raw_cuda_graph()), *ends, data, ctypes.byref(count))
    assert status == 0 and 0 < count.value < 4096
    return sum(edge[2] == 1 for edge in data[: count.value])


def _captured(chain: Chain) -> Callable[[], Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain.step()

    def run() -> Tensor:
        graph.replay()
        return y

    return run
