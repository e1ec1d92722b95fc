"""``permute`` and ``unpermute`` in Triton, with their backward passes."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ltconvert.kernels.permute.kernels import collect_kernel, hand_out_kernel

TILE = 2048  # elements
CHANNELS = 512  # at most, of a tile


def permute(x_NC: Tensor, place_NK: Tensor) -> Tensor:
    """See ``ltconvert.kernels.permute.permute``."""
    return _permute(x_NC, place_NK)


def unpermute(y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """See ``ltconvert.kernels.permute.unpermute``."""
    return _unpermute(y_MC, place_NK, weight_NK)


@torch.library.custom_op("ltconvert::permute", mutates_args=())
def _permute(x_NC: Tensor, place_NK: Tensor) -> Tensor:
    out_MC = _rows(x_NC, place_NK)
    _hand_out(x_NC, place_NK, out_MC)
    return out_MC


@_permute.register_fake
def _rows(x_NC: Tensor, place_NK: Tensor) -> Tensor:
    return x_NC.new_empty(place_NK.numel(), x_NC.shape[1])


@torch.library.custom_op("ltconvert::unpermute", mutates_args=())
def _unpermute(y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor | None) -> Tensor:
    out_NC = _tokens(y_MC, place_NK, weight_NK)
    (tokens, choices), channels = place_NK.shape, y_MC.shape[1]
    tile = _tile(channels)
    grid = triton.cdiv(tokens, tile["BN"]), triton.cdiv(channels, tile["BC"])
    with torch.cuda.device_of(y_MC):
        collect_kernel[grid](
            y_MC.contiguous(), place_NK.contiguous(),
            y_MC if weight_NK is None else weight_NK.contiguous(), out_NC, tokens, channels,
            K=choices, WEIGHTED=weight_NK is not None, **tile,
        )  # fmt: skip
    return out_NC


@_unpermute.register_fake
def _tokens(y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor | None) -> Tensor:
    return y_MC.new_empty(place_NK.shape[0], y_MC.shape[1])


@torch.library.custom_op("ltconvert::unpermute_backward", mutates_args=())
def _unpermute_backward(
    do_NC: Tensor, y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    dy_MC, dweight_NK = _gradients(do_NC, y_MC, place_NK, weight_NK)
    _hand_out(do_NC, place_NK, dy_MC, weight_NK, y_MC, dweight_NK)
    return dy_MC, dweight_NK


@_unpermute_backward.register_fake
def _gradients(
    do_NC: Tensor, y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    return y_MC.new_empty(y_MC.shape), weight_NK.new_empty(weight_NK.shape)


def _hand_out(x_NC: Tensor, place_NK: Tensor, out_MC: Tensor, *weighted: Tensor) -> None:
    """Launch; ``weighted``: the weights, the rows that they weighed, their gradient."""
    (tokens, choices), channels = place_NK.shape, x_NC.shape[1]
    x = x_NC.contiguous()
    weight, y, dweight = weighted or (x, x, x)  # no kernel reads or writes those
    tile = _tile(channels)
    with torch.cuda.device_of(x):
        hand_out_kernel[(triton.cdiv(tokens, tile["BN"]),)](
            x, place_NK.contiguous(), weight.contiguous(), y.contiguous(), out_MC, dweight,
            tokens, channels,
            K=choices, WEIGHTED=bool(weighted), **tile,
        )  # fmt: skip


def _tile(channels: int) -> dict[str, int]:
    width = min(CHANNELS, triton.next_power_of_2(channels))
    return {"BN": max(1, TILE // width), "BC": width, "num_warps": 4}


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_backward(ctx: Any, dy_MC: Tensor) -> tuple[Tensor, None]:
    return _unpermute(dy_MC, ctx.saved_tensors[0], None), None


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, do_NC: Tensor) -> tuple[Tensor, None, Tensor]:
    dy_MC, dweight_NK = _unpermute_backward(do_NC, *ctx.saved_tensors)
    return dy_MC, None, dweight_NK


_permute.register_autograd(_permute_backward, setup_context=_keep_places)
_unpermute.register_autograd(_backward, setup_context=_keep_inputs)
