"""What the host sees of decoding: where prompts begin, new tokens, the end of each row.

B rows, T tokens of the prompt, n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Padding at the left of each row, in tokens.

    Raises:
        ValueError: padding elsewhere, or a row of nothing else.
    """
    rows, width = input_ids.shape
    if attention_mask is None:
        return [0] * rows
    kept_BT = attention_mask.bool().cpu()
    if kept_BT.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the prompts' shape {list(input_ids.shape)}, got "
            f"{list(kept_BT.shape)}"
        )
    if not kept_BT[:, -1].all() or (kept_BT[:, 1:] < kept_BT[:, :-1]).any():
        raise ValueError("prompts must be padded at the left alone, and each have a token")
    return (width - kept_BT.sum(1)).tolist()


class Block:
    """A few tokens: launched when it is made, waited for when they are read.

    Args:
        token_B: the token of each row, which ``advance`` replaces.
        advance: makes the next token; None takes the one that is there.
    """

    def __init__(self, token_B: Tensor, count: int, advance: Callable[[], None] | None) -> None:
        device_Bn = token_B.new_empty(len(token_B), count)
        for index in range(count):
            if advance is not None:
                advance()
            device_Bn[:, index] = token_B
        self._tokens_Bn = device_Bn.to("cpu", non_blocking=True)  # into pinned memory
        self._copied: torch.cuda.Event | None = None
        if token_B.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_B.device))

    def tokens(self) -> Tensor:
        """The tokens [B, n] on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tokens_Bn


class Rows:
    """Which rows have ended; on the host."""

    def __init__(self, count: int, stop_tokens: Sequence[int], pad_token: int) -> None:
        self.stops = torch.tensor(list(stop_tokens), dtype=torch.int64)
        self.pad_token = pad_token
        self.done_B = torch.zeros(count, dtype=torch.bool)

    @classmethod
    def of(cls, model: Any, count: int, stop_tokens: Sequence[int] | None) -> Rows:
        """With the stop and padding tokens of a model's generation settings."""
        settings = model.generation_config
        if stop_tokens is None:
            own = settings.eos_token_id
            stop_tokens = own if isinstance(own, list) else [] if own is None else [own]
        pad = settings.pad_token_id
        return cls(count, stop_tokens, pad if pad is not None else [*stop_tokens, 0][0])

    @property
    def all_done(self) -> bool:
        """No row goes on."""
        return bool(self.done_B.all())

    def cut(self, tokens_Bn: Tensor) -> Tensor:
        """The block with padding behind every row's end, without columns of nothing else."""
        stops_Bn = torch.isin(tokens_Bn, self.stops)
        ended_Bn = (stops_Bn.cumsum(1) > 0) | self.done_B[:, None]
        before_Bn = torch.cat([self.done_B[:, None], ended_Bn[:, :-1]], dim=1)
        self.done_B = ended_Bn[:, -1]
        shown = ~before_Bn.all(0)
        return tokens_Bn.masked_fill(before_Bn, self.pad_token)[:, shown]
