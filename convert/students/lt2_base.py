"""What transformers needs to know of LT2 models: the class they share, and their output.

B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ltconvert.convert.mixers.attention import ZeroLinear
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.students.dreamer.router import Routes
from ltconvert.convert.students.lt2_config import LT2Config

# transformers renamed the cache of models and outputs after 5.17
CACHE_NAME = (
    "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"
)


def keeps_states(config: LT2Config, hidden_states: bool | None, attentions: bool | None) -> bool:
    """Whether a pass gives its hidden states; the config says it where an argument is None.

    Raises:
        ValueError: attention weights are asked for, or single hidden states.
    """
    if config.output_attentions if attentions is None else attentions:
        raise ValueError(
            "output_attentions=True is not supported by LT2, whose layers never form attention "
            "weights; leave it out"
        )
    wanted = config.output_hidden_states if hidden_states is None else hidden_states
    if not isinstance(wanted, bool):
        raise ValueError(
            f"output_hidden_states is {wanted!r}, and LT2 gives all hidden states or none; "
            "take True and pick from output.hidden_states"
        )
    return wanted


@dataclass
class LT2Output(CausalLMOutputWithPast):
    """Output of LT2Model and LT2ForCausalLM; the cache is under the name that transformers uses.

    Attributes:
        hidden_states: where asked for, [B, T, C] each: the embeddings, then what every visit of a
            layer that was computed passes on, in order of execution; the last one as the head
            reads it.
        loop_states: the normed residual stream [B, T, C] after each loop that was computed.
        exit_logits: the exit gate after each of them, [B, T, loops].
        choice_loss: mean over visits of the loss of what chooses their keys, where asked for.
        routes: of a Dreamer's two pools (attention, MLPs), a pair a depth; empty while all is
            forced, None of other models.
    """

    last_hidden_state: Tensor | None = None
    loop_states: tuple[Tensor, ...] | None = None
    exit_logits: Tensor | None = None
    choice_loss: Tensor | None = None
    routes: tuple[tuple[Routes, Routes], ...] | None = None


class LT2PreTrainedModel(PreTrainedModel):
    """Base of all LT2 models, as transformers wants it."""

    config_class = LT2Config
    config: LT2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer", "DreamerLayer"]  # noqa: RUF012 (transformers' form)
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(module, ZeroLinear):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                nn.init.zeros_(bias)
            if isinstance(module, Linear):
                module.reset_corrections()
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: saved folders point at the installed package, no source is copied."""
