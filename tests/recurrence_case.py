"""The recurrences that linear mixers stand for, token by token in fp64, and random inputs for them.

K is the key width, V the value width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NAMES = ("q", "k", "v", "beta", "log_decay", "initial_state_BHKV")
Run = Callable[..., tuple[Tensor, Tensor]]


def recurrence(
    inputs: dict[str, Tensor], segment_ids_BT: Tensor | None = None, keep_BT: Tensor | None = None,
    scale: float | None = None, l2norm_qk: bool = True, **_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, row by row, head by head, with outer products; without beta: no correction.

    `l2norm_qk` holds for the delta rule, that is with beta.
    """
    q, k, v, state = (inputs[n] for n in ("q", "k", "v", "initial_state_BHKV"))
    beta, log_decay = inputs.get("beta"), inputs.get("log_decay")
    batch, length, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    outputs, final = torch.zeros_like(v), torch.zeros_like(state)
    for b in range(batch):
        for h in range(heads):
            s, last = state[b, h], None
            for t in range(length):
                if keep_BT is not None and not keep_BT[b, t]:
                    continue
                if segment_ids_BT is not None:
                    if last is not None and segment_ids_BT[b, t] != last:
                        s = torch.zeros_like(s)
                    last = segment_ids_BT[b, t]
                qt, kt, write = q[b, t, h], k[b, t, h], v[b, t, h]
                if beta is not None and l2norm_qk:
                    qt = qt / torch.sqrt(qt.dot(qt) + 1e-6)
                    kt = kt / torch.sqrt(kt.dot(kt) + 1e-6)
                if log_decay is not None:  # one number, or one for each row of the state
                    s = s * torch.exp(log_decay[b, t, h]).reshape(-1, 1)
                if beta is not None:
                    write = beta[b, t, h] * (write - s.T @ kt)
                s = s + torch.outer(kt, write)
                index = (torch.tensor(b), torch.tensor(t), torch.tensor(h))
                outputs = outputs.index_put(index, scale * (s.T @ qt))
            final = final.index_put((torch.tensor(b), torch.tensor(h)), s)
    return outputs, final


def make_inputs(
    length: int, batch: int = 2, heads: int = 2, width: int = 8, value: int = 5,
    decay: str | None = "token", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """fp64 inputs of the delta rule; `decay`: one a "token", one a "channel", or None."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "q": normal(batch, length, heads, width),
        "k": normal(batch, length, heads, width),
        "v": normal(batch, length, heads, value),
        "beta": torch.sigmoid(normal(batch, length, heads)) * 2,
        "initial_state_BHKV": normal(batch, heads, width, value),
    }
    if decay is not None:
        shape = (batch, length, heads) + ((width,) if decay == "channel" else ())
        inputs["log_decay"] = -torch.nn.functional.softplus(normal(*shape))
    return inputs


def compare(
    run: Run, inputs: dict[str, Tensor], tolerance: float = 1e-9, **options: object
) -> None:
    """Outputs, final state and all gradients of `run(inputs, **options)`, fp64 on both sides."""
    ours = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    truth = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    got, want = run(ours, **options), recurrence(truth, **options)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in want]
    for results in (got, want):
        sum((x * w).sum() for x, w in zip(results, weights, strict=True)).backward()
    torch.testing.assert_close(got[0], want[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1], want[1], atol=tolerance, rtol=tolerance)
    for name in inputs:
        a, b = ours[name].grad, truth[name].grad
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(
            a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"grad of {n}: {m}"
        )


def tokens(inputs: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
    """Some of the tokens of every input that has tokens."""
    return {n: x if n == "initial_state_BHKV" else x[:, part] for n, x in inputs.items()}
