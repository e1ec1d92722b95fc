"""The explicit list of teacher families, and the refusal of everything else."""

from __future__ import annotations

from ltconvert.convert.teachers import gemma, huginn, llama, nanbeige, olmo, ouro, qwen, smollm
from ltconvert.convert.teachers.family import Config, Family
from ltconvert.errors import UserError

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **smollm.FAMILIES,
    **olmo.FAMILIES,
    **gemma.FAMILIES,
    **ouro.FAMILIES,
    **nanbeige.FAMILIES,
    **huginn.FAMILIES,
}

_OTHER_LOOPS = {
    "hrm_text": "two stacks that call each other, and prompts that attend to what follows",
    "inkling2_loop": "a looped mixture of experts with relative positions",
    "inkling2_loop_text": "a looped mixture of experts with relative positions",
}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_ENCODERS = ("bert", "electra", "t5", "bart", "pegasus", "deberta", "mpnet", "esm", "whisper")


def family_of(config: Config) -> Family:
    """The family of a parsed config.json.

    Raises:
        UserError: it is none of FAMILIES, in one line that says why and lists those.
    """
    model_type = config.get("model_type")
    reason = _refusal(config, str(model_type))
    if reason is None and model_type in FAMILIES:
        return FAMILIES[model_type]
    what = f"model_type {model_type!r}" if model_type else "a config.json without model_type"
    why = f" ({reason})" if reason else ""
    raise UserError(
        f"{what} is not supported as a teacher{why}; supported: {', '.join(FAMILIES)} "
        "(causal language models)"
    )


def _refusal(config: Config, model_type: str) -> str | None:
    """Why a config cannot be a teacher, or None."""
    if model_type in _OTHER_LOOPS:
        return _OTHER_LOOPS[model_type]
    if "arch" in config and "H_cycles" in str(config):
        return "a tiny recursive model is not a language model"
    if config.get("vision_config") or config.get("audio_config") or "_vl" in model_type:
        return "a multimodal model"
    if "moe" in model_type or "mixtral" in model_type or any(config.get(k) for k in _EXPERT_KEYS):
        return "a mixture of experts"
    if config.get("is_encoder_decoder") or any(name in model_type for name in _ENCODERS):
        return "an encoder"
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return "its tokens attend to later ones: an encoder, as embedding models are"
    heads = config.get("architectures") or []
    if heads and not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in heads):
        return f"architecture {heads[0]} has no language-model head"
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        return f"its weights are quantised with {method}; give the unquantised checkpoint"
    return None
