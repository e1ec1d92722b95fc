"""Chunkwise linear attention: the delta rule and decay attention are two forms of it.

`arguments` checks what they are given. Plain PyTorch: `spans` and `decays`. Triton: `run` launches
the kernels; its ``linear_attention`` is the differentiable op over them. Forwards: `prepare`,
`scan`, `output`. Backwards, with nothing but the inputs kept in between: `prepare` and `scan`
again, `read_gradient`, the reverse scan, `write_gradient`.
"""

NORM_EPS = 1e-6  # added to the squared lengths of q and k
