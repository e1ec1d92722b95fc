"""The benchmark's cases, a module an op; each has ``cases(scale, device)``."""

OPS = (
    "linear_kl",
    "delta_rule",
    "gdn_step",
    "gdn_window_step",
    "decode_attention",
    "decode_linear",
    "decode_experts",
    "decay_attention",
    "window_attention",
    "depth_attention",
    "short_conv",
    "norm_gate",
    "permute",
    "sparse_attention",
    "index_kl",
)
