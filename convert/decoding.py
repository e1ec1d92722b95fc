"""Fast generation: a static cache, one step for all loops, on a GPU replayed as one CUDA graph.

B rows, T tokens of the prompt, N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ltconvert.convert.decode_output import Block, Rows, left_padding
from ltconvert.convert.decode_step import Step
from ltconvert.convert.decode_weights import places
from ltconvert.convert.sampling import Sampling, choose
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.static_cache import StaticCache

GREEDY = Sampling()
WARM_UP_STEPS = 2


class Decoder:
    """Generates with one LT2 model, teacher or student, again and again with the same memory.

    Greedy tokens are those of ``model.generate()``. Rows may differ in length: prompts are padded
    at the left, and padding takes no part in anything. The model's projections are joined where
    they have one input: their parameters become views (``decode_weights.split`` undoes it), the
    model works as before. While a Decoder is used the weights have to stay where they are.

    Args:
        batch: rows; every call has so many.
        max_length: tokens a row, prompt and new ones together.
        prefill_tokens: the prompt is read in chunks of so many.
        block_tokens: new tokens come, and stop tokens are looked for, in blocks of so many. The
            next block is on its way by then, so that nothing waits.
        graph: replay a CUDA graph; by default where the model is on a GPU and all loops are run.
        exit_threshold: loops end for a token once the exit probabilities of all rows, those that
            have ended included, add up to it; None: never. ``cache.steps`` and ``cache.loops``
            then count the tokens of a call and the loops that they took.
        loop_cache: ``last``: full layers keep the keys of their last loop alone, in 1/loops of the
            memory (``students/shared_cache.py``); prompts are then read in one pass.

    Raises:
        ValueError: a threshold without an exit gate, or with a graph, which cannot branch; chunks
            or blocks of no tokens.
    """

    def __init__(
        self,
        model: LT2ForCausalLM,
        batch: int,
        max_length: int,
        *,
        prefill_tokens: int = 2048,
        block_tokens: int = 8,
        graph: bool | None = None,
        exit_threshold: float | None = None,
        loop_cache: str | None = None,
    ) -> None:
        if min(prefill_tokens, block_tokens) < 1:
            raise ValueError(
                f"prefill_tokens and block_tokens are at least 1, got {prefill_tokens} and "
                f"{block_tokens}"
            )
        self.model, self.batch, self.max_length = model, batch, max_length
        # A second chunk would look at the last loop's keys of the first one.
        one_pass = loop_cache == "last"
        self.prefill_tokens = max_length if one_pass else prefill_tokens
        self.block_tokens = block_tokens
        self.cache = StaticCache.for_model(model, batch, max_length, loop_cache)
        self.step = Step(model, self.cache, exit_threshold)
        if graph and self.step.exits:
            raise ValueError(
                f"a CUDA graph cannot branch: with exit_threshold {exit_threshold} leave out graph"
            )
        on_gpu = model.device.type == "cuda" and not self.step.exits
        self.graph = on_gpu if graph is None else graph
        self.generator = torch.Generator(model.device)
        with torch.inference_mode(False):
            self.token_B = torch.zeros(batch, dtype=torch.int64, device=model.device)
            self.seen_BV = torch.zeros(
                batch, model.config.vocab_size, dtype=torch.bool, device=model.device
            )
        self._places = places(model)
        self._advances: dict[Sampling, Callable[[], None]] = {}
        self._calls = 0

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
    ) -> Tensor:
        """New tokens alone, [B, N] on the CPU; see ``stream``."""
        blocks = self.stream(
            input_ids, attention_mask, max_new_tokens=max_new_tokens, sampling=sampling,
            seed=seed, stop_tokens=stop_tokens,
        )  # fmt: skip
        return torch.cat(list(blocks), dim=1)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """New tokens in blocks [B, n] on the CPU, until every row has stopped.

        Args:
            input_ids: [B, T], prompts padded at the left.
            attention_mask: [B, T], 0 at padding; None when there is none.
            seed: of this call's draws: the same seed draws the same tokens.
            stop_tokens: a row ends with the first of these and is padding from there on; by
                default the model's own.

        Raises:
            RuntimeError: when read after a later call has begun.
            ValueError: shapes that do not fit this decoder, a mask that is not padding at the
                left, or weights that have moved.
        """
        padding = self._check(input_ids, attention_mask, max_new_tokens)
        self._calls += 1  # the cache is this call's from here on
        return self._stream(
            self._calls, input_ids, attention_mask, padding, max_new_tokens, sampling, seed,
            stop_tokens,
        )  # fmt: skip

    def _stream(
        self,
        call: int,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        padding: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop_tokens: Sequence[int] | None,
    ) -> Iterator[Tensor]:
        self._check_turn(call)
        rows = Rows.of(self.model, self.batch, stop_tokens)
        with torch.no_grad(), self._on_device():
            advance = self.prepare(sampling)
            self.generator.manual_seed(seed)
            self._mark_prompt(input_ids, attention_mask)
            self._take(self.prefill(input_ids, padding), sampling)
            waiting: Block | None = Block(self.token_B, 1, None)
        made = 1
        while waiting is not None:
            self._check_turn(call)
            count = min(self.block_tokens, max_new_tokens - made)
            with torch.no_grad(), self._on_device():
                following = Block(self.token_B, count, advance) if count else None
            made += count
            if (tokens := rows.cut(waiting.tokens())).shape[1]:
                yield tokens
            waiting = None if rows.all_done else following

    def _check_turn(self, call: int) -> None:
        if call != self._calls:
            raise RuntimeError(
                "this stream's cache is in use by a later call; read one to its end before the "
                "next, or make a Decoder for each"
            )

    def _on_device(self) -> AbstractContextManager[object]:
        """The model's GPU as the current one, whose streams and graphs these are."""
        device = self.model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, padding: Sequence[int]) -> Tensor:
        """Read prompts with so much padding at the left; logits [B, V] behind their last tokens."""
        self.cache.reset()
        shared = min(padding)
        ids_BT = input_ids[:, shared:].to(self.model.device)
        padding = [empty - shared for empty in padding]
        mask_BT = None
        if any(padding):
            columns_T = torch.arange(ids_BT.shape[1])
            mask_BT = (columns_T >= torch.tensor(padding)[:, None]).long().to(ids_BT.device)
        for start in range(0, ids_BT.shape[1], self.prefill_tokens):
            stop = min(start + self.prefill_tokens, ids_BT.shape[1])
            output = self.model.model(
                ids_BT[:, start:stop],
                attention_mask=None if mask_BT is None else mask_BT[:, :stop],
                cache=self.cache,
            )
        self.cache.settle(padding)
        return self.model.logits(output.last_hidden_state[:, -1])

    @torch.no_grad()
    def prepare(self, sampling: Sampling = GREEDY) -> Callable[[], None]:
        """What makes one token of ``token_B`` the next one; on a GPU it is captured here, once.

        Capturing runs steps: what the cache held is lost, and it is empty afterwards.
        """
        if sampling not in self._advances:

            def advance() -> None:
                self._take(self.step(self.token_B), sampling)

            self._advances[sampling] = self._captured(advance) if self.graph else advance
        return self._advances[sampling]

    def _captured(self, advance: Callable[[], None]) -> Callable[[], None]:
        """``advance`` as a replay. Kernels are compiled and tables made in a warm-up before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.cache.reset()  # there may be room for one token alone
                advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            advance()
        self.cache.reset()
        return graph.replay

    def _take(self, logits_BV: Tensor, sampling: Sampling) -> None:
        """Choose the next token of each row; in place, as a graph needs it."""
        penalised = sampling.repetition_penalty != 1
        seen_BV = self.seen_BV if penalised else None
        generator, out_B = self.generator, self.token_B
        choose(logits_BV, sampling, seen_BV=seen_BV, generator=generator, out_B=out_B)
        if penalised:
            self.seen_BV.scatter_(1, self.token_B[:, None], True)

    def _mark_prompt(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """The tokens of the prompts are the first that a repetition penalty is for."""
        ids_BT = input_ids.to(self.seen_BV.device)
        real_BT = torch.ones_like(ids_BT) if attention_mask is None else attention_mask
        self.seen_BV.zero_()
        counts_BV = torch.zeros_like(self.seen_BV, dtype=torch.int32)
        counts_BV.scatter_add_(1, ids_BT, real_BT.to(ids_BT.device, torch.int32))
        self.seen_BV.copy_(counts_BV > 0)

    def _check(self, ids_BT: Tensor, mask_BT: Tensor | None, new_tokens: int) -> list[int]:
        """Padding at the left of each row."""
        if ids_BT.dim() != 2:
            raise ValueError(f"expected prompts [rows, tokens], got {list(ids_BT.shape)}")
        rows, width = ids_BT.shape
        if rows != self.batch or not width:
            raise ValueError(
                f"this decoder has {self.batch} rows, got prompts {list(ids_BT.shape)}"
            )
        if new_tokens < 1 or width + new_tokens - 1 > self.max_length:
            raise ValueError(
                f"{width} tokens of prompt and {new_tokens} new ones do not fit a max_length of "
                f"{self.max_length}"
            )
        if places(self.model) != self._places:
            raise ValueError(
                "the model's weights have moved, or its routing was set, since; make a new Decoder"
            )
        return left_padding(ids_BT, mask_BT)
