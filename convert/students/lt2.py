"""LT2 (arXiv 2605.20670): a decoder, looped or not, whose layers each have their own token mixer.

The same class is the teacher (every mixer ``full``) and the student, so that a student which keeps
all layers is its teacher by construction. B rows, T tokens, C hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin

from ltconvert.convert.students.cache import STATIC_CACHE, LoopCache, check_cache
from ltconvert.convert.students.exits import exit_probabilities
from ltconvert.convert.students.lt2_base import CACHE_NAME, LT2Output, LT2PreTrainedModel
from ltconvert.convert.students.lt2_config import LT2Config
from ltconvert.convert.students.lt2_model import LT2Model

__all__ = ["LT2Config", "LT2ForCausalLM", "LT2Model", "LT2Output", "exit_probabilities"]


class LT2ForCausalLM(LT2PreTrainedModel, GenerationMixin):
    """LT2Model with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' form)

    def __init__(self, config: LT2Config) -> None:
        super().__init__(config)
        self.model = LT2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, C]; the embedding's when tied."""
        return self.lm_head.weight

    def new_cache(self, loop_cache: str | None = None) -> LoopCache:
        """An empty cache with a slot for every visit of a layer; see ``LT2Model.new_cache``."""
        return self.model.new_cache(loop_cache)

    def logits(self, h_BTC: Tensor) -> Tensor:
        """Normed hidden states -> logits [..., V], soft cap applied."""
        logits = self.lm_head(h_BTC)
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def expected_logits(self, output: LT2Output) -> Tensor:
        """Logits of all loops averaged by their exit probabilities, [B, T, V], fp32 at least.

        Ouro's weighted exit (arXiv 2510.25741): the mean of logits, not of probabilities.

        Args:
            output: of a forward pass through all loops.

        Raises:
            ValueError: the model has no exit gate.
        """
        if output.exit_logits is None or output.loop_states is None:
            raise ValueError(
                f"a {self.config.family} model has no exit gate to average its loops by; "
                "take output.logits"
            )
        weights_BTL = exit_probabilities(output.exit_logits)
        parts = zip(weights_BTL.split(1, dim=-1), output.loop_states, strict=True)
        return torch.stack([weight * self.logits(h_BTC) for weight, h_BTC in parts]).sum(0)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopCache | None = None,
        cache: LoopCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        segment_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        exit_threshold: float | None = None,
        loop_cache: str | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> LT2Output:
        """Token ids [B, T] -> logits [B, T or logits_to_keep, V] of the last loop computed.

        ``exit_threshold``, ``loop_cache`` and the outputs see ``LT2Model.forward``; ``generate()``
        takes them, too.

        ``labels`` [B, T] are the token ids themselves, -100 where no loss is wanted; they are
        shifted here, as everywhere in transformers. The loss is their mean, or their sum over
        ``num_items_in_batch``, by which transformers' Trainer averages over accumulated batches.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=cache if cache is not None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            exit_threshold=exit_threshold,
            loop_cache=loop_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output.logits = self.logits(output.last_hidden_state[:, keep])
        if labels is not None:
            flat = output.logits[:, :-1].flatten(0, 1).float()
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(flat, labels[:, 1:].flatten(), reduction=reduction)
            output.loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return output

    def _prepare_cache_for_generation(  # type: ignore[override]  # the signature varies by version
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """A LoopCache where generate() would make a cache that knows nothing of loops."""
        if generation_config.use_cache is False:
            return
        if (given := model_kwargs.get(CACHE_NAME)) is not None:
            check_cache(given, len(self.model.schedule))
            return
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported "
                "by LT2; leave it out (and the --compile of `transformers serve`), or pass as "
                f"{CACHE_NAME} {STATIC_CACHE}"
            )
        model_kwargs[CACHE_NAME] = cache = self.new_cache(model_kwargs.get("loop_cache"))
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()  # windows keep what a refused draft is taken back to

    @property
    def init_continuous_batching(self) -> NoReturn:  # type: ignore[override]
        """Not there, and so `transformers serve` answers one request after the other.

        Its paged cache has a place for keys and values of a layer, none for loops and states.
        """
        raise AttributeError

    def generate_batch(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Refused, see ``init_continuous_batching``.

        Raises:
            ValueError: says what to call.
        """
        raise ValueError(
            "continuous batching is not supported by LT2, whose loops and states no paged cache "
            "holds; call generate() with the rows of a batch padded at the left"
        )

    continuous_batching_context_manager = generate_batch


AutoConfig.register("lt2", LT2Config, exist_ok=True)
AutoModelForCausalLM.register(LT2Config, LT2ForCausalLM, exist_ok=True)
