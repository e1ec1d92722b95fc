"""The decoder without its head: embeddings, the looped layers, the final norm.

B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ltconvert.convert.mixers import Projections, SequenceContext, make_mixer
from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.mixers.rope import Rope
from ltconvert.convert.students.blocks import (
    ChoosingCall,
    DecoderLayer,
    LayerCall,
    run_choosing_layer,
    run_layer,
)
from ltconvert.convert.students.cache import LoopCache, check_cache
from ltconvert.convert.students.depth import prepare_depth
from ltconvert.convert.students.depth_layer import DepthCall
from ltconvert.convert.students.depth_plan import DepthPlan
from ltconvert.convert.students.dreamer.model import make_dreamer
from ltconvert.convert.students.exits import leaving, run_until_exit
from ltconvert.convert.students.injection import Injection
from ltconvert.convert.students.loop import LoopState, Step
from ltconvert.convert.students.lt2_base import (
    CACHE_NAME,
    LT2Output,
    LT2PreTrainedModel,
    keeps_states,
)
from ltconvert.convert.students.lt2_config import LT2Config
from ltconvert.convert.students.sequence import read_sequence
from ltconvert.convert.students.shared_cache import owners
from ltconvert.convert.students.visits import first_state, visit_layer


class LT2Model(LT2PreTrainedModel):
    """Embeddings, the looped layers and the final norm.

    Attributes:
        layers: none in a Dreamer, whose one layer is ``dreamer``.
        depth_plan, depth_schedule: where layers read a depth stream, its plan, and the scalar s of
            their merge: 0 is the teacher. Training moves it to 1; it is saved with the weights.
    """

    layers: Any  # nn.ModuleList, whose entries mypy would take for plain modules
    depth_plan: DepthPlan | None
    depth_schedule: Tensor

    def __init__(self, config: LT2Config) -> None:
        super().__init__(config)
        spec = config.spec()
        self.spec = spec
        self.schedule = config.schedule()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, self.make_mixer(kind, layer))
            for layer, kind in enumerate(() if config.dreamer else config.mixers)
        )
        self.dreamer = make_dreamer(config, self.make_mixer)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_offset)
        self.injection = Injection(spec) if spec.initial_state_std is not None else None
        self.exit_gate = nn.Linear(spec.hidden_size, 1) if spec.exit_gate else None
        self.loop_residual = (
            nn.Parameter(torch.zeros(spec.num_loops, spec.hidden_size))
            if config.loop_residual
            else None
        )
        self._ropes = {name: Rope(params, spec.head_dim) for name, params in spec.rope.items()}
        self.gradient_checkpointing = False
        # Compiled ones while it trains.
        self.call_layer: LayerCall = run_layer
        self.call_choosing_layer: ChoosingCall = run_choosing_layer
        self.call_depth_layer = DepthCall()
        prepare_depth(self)
        self.post_init()

    def make_mixer(self, kind: str, layer: int) -> Projections:
        """A new mixer for one physical layer with this model's options."""
        config = self.config
        return make_mixer(
            kind,
            config.spec(),
            layer,
            window_tokens=config.window_tokens,
            conv_size=config.conv_size,
            sdpa_gate=config.sdpa_gate,
            top_k_tokens=config.top_k_tokens,
            index_heads=config.index_heads,
            block_tokens=config.block_tokens,
            chosen_blocks=config.chosen_blocks,
            depth_rope=config.depth_rope,
            depth_bias=config.depth_bias,
        )

    def new_cache(self, loop_cache: str | None = None) -> LoopCache:
        """An empty cache with a slot for every visit; ``last`` see ``shared_cache``."""
        windows = [self.config.window(step.layer, step.loop) for step in self.schedule]
        return LoopCache(self.config.layer_types, windows, owners(self.config, loop_cache))

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, T] -> the residual stream [B, T, C]."""
        return self._scaled(self.embed_tokens(input_ids))

    def _scaled(self, h_BTC: Tensor) -> Tensor:
        """Rows of the embedding as the first layer reads them."""
        scale = self.spec.embedding_scale
        return h_BTC if scale == 1.0 else h_BTC * torch.tensor(scale, dtype=h_BTC.dtype)

    def context(
        self,
        h_BTC: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        past_length: int = 0,
    ) -> SequenceContext:
        """What all layers share in one pass.

        Args:
            attention_mask: [B, past + T], 0 at padding; None when there is none.
            position_ids: [B, T]; by default counted over real tokens, from 0 in each document.
            segment_ids: [B, T] document numbers of packed rows.

        Raises:
            ValueError: the mask is not [B, past + T], or documents are packed behind a cache.
        """
        context = read_sequence(
            h_BTC, self._ropes, attention_mask, position_ids, segment_ids, past_length
        )
        if self.call_layer is not run_layer and not past_length:
            context.prepare(self.windows())
        return context

    def windows(self) -> set[int | None]:
        """Windows of the softmax attention there is, None the whole row."""
        if self.dreamer is not None:
            skipped = self.dreamer.config.skipped_attention
            return {w for depth, w in enumerate(self.dreamer.windows) if depth not in skipped}
        visits = [(self.layers[step.layer].mixer, step.loop) for step in self.schedule]
        return {mixer.window_in(loop) for mixer, loop in visits if isinstance(mixer, Attention)}

    def start(self, h_BTC: Tensor) -> LoopState:
        """The state before the first visit, without a depth stream."""
        return LoopState(h_BTC, h_BTC)

    def run(
        self,
        state: LoopState,
        context: SequenceContext,
        cache: LoopCache | None = None,
        first_slot: int = 0,
        last_slot: int | None = None,
    ) -> LoopState:
        """Visits from ``first_slot`` to before ``last_slot`` (None: all, final norm included)."""
        for step in self.schedule[first_slot:last_slot]:
            state = self.visit(step, state, context, cache)
        done = last_slot is None or last_slot >= len(self.schedule)
        return self.finish(state) if done else state

    def visit(
        self, step: Step, state: LoopState, context: SequenceContext, cache: LoopCache | None = None
    ) -> LoopState:
        """One visit of one layer, with what opens and closes its loop."""
        state = self.enter(step, state, context)
        state = self.leave(step, visit_layer(self, step, state, context, cache))
        if state.hidden_states is not None:
            state = replace(state, hidden_states=(*state.hidden_states, state.h_BTC))
        return state

    def context_of(self, step: Step, context: SequenceContext) -> SequenceContext:
        """What a visit reads: the loop is said where it has tensors or windows of its own."""
        loops, _ = self.spec.own_tensors(step.layer)
        differs = loops > 1 or not isinstance(self.config.window_tokens, int)
        return context.at(step.loop if differs else 0)

    def call(self, function: Any, *arguments: Any) -> Any:
        """A function of a layer, its activations made again for the backward pass if asked for."""
        if self.gradient_checkpointing and self.training:
            # Layers draw no random numbers, and a CUDA graph could not read the generator's state.
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(function, *arguments, **options)
        return function(*arguments)

    def enter(self, step: Step, state: LoopState, context: SequenceContext) -> LoopState:
        """Remember the stream at the start of a loop, the prelude's output added where it is."""
        if not step.opens_loop:
            return state
        if self.injection is not None:
            state = self.injection.enter(step, state, context.positions_BT)
        return replace(state, loop_in_BTC=state.h_BTC)

    def leave(self, step: Step, state: LoopState) -> LoopState:
        """Close a loop: loop residual, then the norm, which ``spec.loop_norm`` may go on from."""
        if not step.closes_loop:
            return state
        h_BTC = state.h_BTC
        if self.loop_residual is not None:
            h_BTC = h_BTC + self.loop_residual[step.loop].to(h_BTC.dtype) * state.loop_in_BTC
        normed_BTC = self.norm(h_BTC)
        if self.spec.norm_closes(step.loop):
            h_BTC = normed_BTC
        return replace(state, h_BTC=h_BTC, loop_states=(*state.loop_states, normed_BTC))

    def finish(self, state: LoopState) -> LoopState:
        """The stream that the head reads: the last loop's, or the coda's, normed once."""
        if self.schedule[-1].closes_loop:  # no coda, or fewer depths of a Dreamer
            return state.with_stream(state.loop_states[-1])
        return state.with_stream(self.norm(state.h_BTC))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        past_key_values: LoopCache | None = None,
        cache: LoopCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        exit_threshold: float | None = None,
        loop_cache: str | None = None,
        learns_choice: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> LT2Output:
        """Token ids [B, T] -> last_hidden_state [B, T, C], loop_states, exit_logits, cache.

        With ``output_hidden_states`` also ``hidden_states``, see ``LT2Output``; with
        ``learns_choice``, and without a cache, also ``choice_loss``. ``loop_cache`` is that of a
        cache that is made here, see ``new_cache``.

        ``exit_threshold`` is for one token behind a cache: once the exit probabilities of the loops
        so far add up to it in all rows, the loops that are left are not computed (``exits.py``
        says what their caches get). Prompts go through all loops; so does everything at 1.

        Raises:
            ValueError: a cache of another model, a threshold without an exit gate, or
                ``output_attentions``: attention weights are never formed.
        """
        keeps = keeps_states(self.config, output_hidden_states, output_attentions)
        leaves = leaving(self, exit_threshold)
        h_BTC = self._stream(input_ids, inputs_embeds)
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache:
            cache = self.new_cache(loop_cache)
        check_cache(cache, len(self.schedule))
        context = self.context(
            h_BTC,
            attention_mask=attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            past_length=0 if cache is None else cache.num_tokens,
        )
        context.learns_choice = learns_choice
        state = first_state(self, h_BTC, context)
        if keeps:
            state = replace(state, hidden_states=(h_BTC,))
        if leaves is not None and cache is not None and cache.num_tokens and h_BTC.shape[1] == 1:
            state = run_until_exit(self, state, context, cache, leaves)
        else:
            state = self.run(state, context, cache)
        if cache is not None:
            cache.advance(h_BTC.shape[1])
        return self._output(state, cache)

    def _stream(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The residual stream [B, T, C] before the first layer."""
        if inputs_embeds is not None and input_ids is None:
            return self._scaled(inputs_embeds)
        if input_ids is not None and inputs_embeds is None:
            return self.embed(input_ids)
        raise ValueError("give either input_ids or inputs_embeds")

    def _output(self, state: LoopState, cache: LoopCache | None) -> LT2Output:
        """What a finished pass gives."""
        gate = self.exit_gate
        exit_logits = (
            None if gate is None else torch.cat([gate(h) for h in state.loop_states], dim=-1)
        )
        hidden = state.hidden_states
        under_its_name: dict[str, Any] = {CACHE_NAME: cache}
        return LT2Output(
            last_hidden_state=state.h_BTC,
            hidden_states=None if hidden is None else (*hidden[:-1], state.h_BTC),
            loop_states=state.loop_states,
            exit_logits=exit_logits,
            choice_loss=torch.stack(state.choice_losses).mean() if state.choice_losses else None,
            routes=None if state.dreamer is None else tuple(state.dreamer.routes),
            **under_its_name,
        )
