"""Chunkwise linear attention in Triton: the delta rule and decay attention are two forms of it.

``forward`` and ``backward`` launch the kernels; ``linear_attention`` is the differentiable op over
them. `prepare` -> `scan` -> `output` forwards; those again, then reversed, and `gradient` backwards:
only the inputs are kept in between.
"""
