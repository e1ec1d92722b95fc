"""Does an output gate keep a looped model from attention sinks and from growing activations?

    python benchmarks/claims/output_gate.py --data text.jsonl.xz --minutes 15

A looped model of full attention is trained with and without ``sdpa_gate``, with as many parameters
(the MLPs make up for the gate) and on the same tokens. Of held-out rows, each read as one document,
are measured for every loop: the share of attention that the queries of the second half give to the
row's first token, over layers and heads, and the largest entry and the root mean square of the
residual stream, the largest of all visits. The gate here is ``2 * sigmoid(W x)``, which starts at 1
where the paper's starts at 1/2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltconvert.benchmarks.claims.common import compare, equal_config, shown, table
from ltconvert.benchmarks.claims.text import TINY, TextBench, text_parser
from ltconvert.benchmarks.claims.trials import Bench, launch, run_trials
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.precision import autocast

PLAIN, GATED = "plain", "gated"


def main(arguments: Sequence[str] | None = None) -> int:
    """See ``trials.launch``."""
    return launch(text_parser(__doc__, "output_gate"), run, TINY, arguments)


def run(bench: Bench) -> None:
    """All trials that are left, then the tables."""
    options, text = bench.options, TextBench(bench)
    rows = text.whole_rows()

    def measure(name: str, seed: int, folder: Path, limit_s: float | None) -> dict[str, Any]:
        mixers = ["full"] * options.layers
        gate = name == GATED
        config = equal_config(options, text.vocab, mixers, options.loops, sdpa_gate=gate)
        model = text.train(config, seed, folder, limit_s)
        looked = look(model, rows, bench.precision)
        size = model_facts(config).parameters
        return {"parameters": size, "loss": text.loss(model), **looked}

    results = run_trials(bench, [PLAIN, GATED], measure)
    for line in figures(results, options.loops):
        bench.log.say(line)
    even = sum(1 / (at + 1) for at in range(options.length // 2, options.length))
    bench.log.say(f"attention spread evenly gives {even / (options.length / 2):.4f} to a token")
    claims = {
        "a gate lowers the attention on the first token": (
            lambda found: max(found["first_token"]), "share without - with, largest loop",
        ),
        "a gate lowers the growth of activations over the loops": (
            lambda found: math.log(found["largest"][-1] / found["largest"][0]),
            "log growth of the largest entry, first to last loop, without - with",
        ),
        "a gate lowers the loss": (
            lambda found: found["loss"], "held-out loss without - with, nats a token",
        ),
    }  # fmt: skip
    findings = []
    for claim, (number, what) in claims.items():
        plain, gated = (
            {seed: number(found) for seed, found in results[name].items()}
            for name in (PLAIN, GATED)
        )
        findings.append(compare(claim, plain, gated, what))
    bench.conclude(findings)


def figures(results: dict[str, dict[int, Any]], loops: int) -> list[str]:
    """A row a variant and loop, means over seeds."""
    rows = []
    for name, of_seed in results.items():
        for loop in range(loops):
            cells = [
                shown([found[what][loop] for found in of_seed.values()], 4)
                for what in ("first_token", "largest", "rms")
            ]
            size = next((found["parameters"] for found in of_seed.values()), "-")
            loss = shown([found["loss"] for found in of_seed.values()])
            rows.append([name, size, loss, loop + 1, *cells])
    head = ["variant", "parameters", "loss", "loop", "on the first token", "largest entry", "RMS"]
    return table(head, rows)


@torch.inference_mode()
def look(model: LT2ForCausalLM, rows: Sequence[Tensor], precision: str) -> dict[str, list[float]]:
    """``first_token``, ``largest`` and ``rms`` by loop.

    Args:
        model: every mixer full.
        rows: token ids [B, T] of whole rows.
    """
    loops, decoder = model.config.num_loops, model.model
    shares: list[list[Tensor]] = [[] for _ in range(loops)]
    largest, rms = ([torch.zeros((), device=model.device)] * loops for _ in range(2))
    with autocast(model.device, precision):
        for ids_BT in rows:
            h_BTC = decoder.embed(ids_BT)
            context, state = decoder.context(h_BTC), decoder.start(h_BTC)
            for step in decoder.schedule:
                layer, loop = decoder.layers[step.layer], step.loop
                read_BTC = layer.mixer_input(state.h_BTC)
                shares[loop].append(first_token_share(layer.mixer, read_BTC, context))
                state = decoder.visit(step, state, context)
                stream_BTC = state.h_BTC.float()
                largest[loop] = largest[loop].maximum(stream_BTC.abs().max())
                rms[loop] = rms[loop].maximum(stream_BTC.square().mean().sqrt())
    return {
        "first_token": [float(torch.cat(of_loop).mean()) for of_loop in shares],
        "largest": [float(x) for x in largest],
        "rms": [float(x) for x in rms],
    }


def first_token_share(mixer: Any, read_BTC: Tensor, context: Any) -> Tensor:
    """Attention of the second half's queries on the first token, mean over them and heads, [B]."""
    length = read_BTC.shape[1]
    at_n = torch.arange(length // 2, length, device=read_BTC.device)
    scores_BHnT, _ = mixer.scores(read_BTC, context, at_n)
    later_nT = torch.arange(length, device=read_BTC.device) > at_n[:, None]
    weights_BHnT = scores_BHnT.masked_fill(later_nT, -torch.inf).softmax(-1)
    return weights_BHnT[..., 0].mean((1, 2))


if __name__ == "__main__":
    sys.exit(main())
