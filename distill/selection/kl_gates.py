"""Method ``kl-gates``: every layer has both mixers and a gate between them; one short run for all.

``y = g full(x) + (1 - g) linear(x)``. The gates of all layers add up to the number of layers that
will stay full, in every step: ``g = sigmoid((score + noise - shift) / temperature)`` with the shift
that makes it so. Scores are all that trains, on the loss of the stage `logits`. The noise is
logistic and drawn anew for every pass (the concrete distribution, arXiv 1611.00712, with which
arXiv 1712.01312 learns what to leave out of a network): most gates are near 0 or 1. Without it they
share the budget, since half a gate takes three quarters of a layer's squared error away, and no
student has halves.

Unlike scores of single layers, gates see each other, as the rounds of ``kl-greedy`` do, for the
cost of one run.

N physical layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.convert.students.blocks import run_layer
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import swapped
from ltconvert.distill.data import Batch
from ltconvert.distill.gradients import NotFinite
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.objective import Wrap
from ltconvert.distill.processes import is_main_process, wait_for_everyone
from ltconvert.distill.selection.probe import Probe
from ltconvert.distill.selection.ranking import order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.selection.short_training import gate_settings
from ltconvert.distill.selection.walk import fitting
from ltconvert.errors import UserError
from ltconvert.recipes.stages import LogitsSettings

FOLDER = "gates"  # the checkpoint of the training, in the stage's folder
TEMPERATURE = 0.5  # of a gate, in units of the noise
_HALVINGS = 64
_RARE = 1e-6


class Gates(nn.Module):
    """N gates in (0, 1) that add up to ``keep``.

    Attributes:
        values_N: as last drawn.

    Args:
        keep: between 0 and N.
    """

    def __init__(self, num_layers: int, keep: int) -> None:
        super().__init__()
        self.keep = keep
        self.scores = nn.Parameter(torch.zeros(num_layers))
        self.values_N = self.settled()

    def settled(self) -> Tensor:
        """The gates without noise."""
        return shares(self.scores.double() / TEMPERATURE, self.keep).float()

    def draw(self) -> None:
        """Set ``values_N`` for one pass."""
        uniform_N = torch.rand_like(self.scores, dtype=torch.float64).clamp(_RARE, 1 - _RARE)
        noisy_N = self.scores.double() + torch.logit(uniform_N)
        self.values_N = shares(noisy_N / TEMPERATURE, self.keep).float()


def shares(scores_N: Tensor, total: float) -> Tensor:
    """``sigmoid(score - shift)`` with the shift for which they add up to ``total`` in (0, N).

    The shift is found by halving; a Newton step at what was found leaves it where it is and has the
    gradient of the implicit function.
    """
    with torch.no_grad():
        # Beyond these all gates together are too open, or not open enough.
        reach = 40.0
        low, high = scores_N.min() - reach, scores_N.max() + reach
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            too_open = torch.sigmoid(scores_N - middle).sum() > total
            low, high = torch.where(too_open, middle, low), torch.where(too_open, high, middle)
        shift = (low + high) / 2
        gates_N = torch.sigmoid(scores_N - shift)
        slope = (gates_N * (1 - gates_N)).sum().clamp(min=1e-12)
    shift = shift + (torch.sigmoid(scores_N - shift).sum() - total) / slope
    return torch.sigmoid(scores_N - shift)


class GatedMixer(nn.Module):
    """Full and linear attention of one layer, mixed by its gate; for passes without a cache."""

    chooses = False  # nothing in it learns

    def __init__(self, full: nn.Module, linear: nn.Module, gates: Gates, layer: int) -> None:
        super().__init__()
        self.full, self.linear, self.gates, self.layer = full, linear, gates, layer

    def forward(self, *inputs: Any) -> Tensor:
        """As either mixer's."""
        linear_BTC = self.linear(*inputs)
        gate = self.gates.values_N[self.layer].to(linear_BTC.dtype)
        return linear_BTC + gate * (self.full(*inputs) - linear_BTC)


class GatesObjective(LogitsObjective):
    """The loss of `logits` on a student with gated mixers, of which the scores alone train."""

    def __init__(
        self,
        teacher: LT2ForCausalLM,
        student: LT2ForCausalLM,
        settings: LogitsSettings,
        gates: Gates,
    ) -> None:
        self.teacher, self.module, self.settings, self.gates = teacher, student, settings, gates

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The scores."""
        return [{"name": "gates", "params": [self.gates.scores], "lr": self.settings.lr}]

    def compile_with(self, wrap: Wrap) -> None:
        """The teacher's layers; gates are other numbers in every step."""
        self.teacher.model.call_layer = wrap(run_layer)

    def work(self, progress: float) -> Hashable | None:
        """Never recorded: gates are drawn anew."""
        return None

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """As in the parent, with gates drawn for it."""
        self.gates.draw()
        return super().train_step(batch, backward, progress)


def rank(probe: Probe) -> Scores:
    """Train the gates and rank by them; the training loop resumes a killed run."""
    state = probe.progress.state or _trained(probe)
    wait_for_everyone()  # before the checkpoint goes that one may still write
    if is_main_process():
        shutil.rmtree(probe.stage_dir / FOLDER, ignore_errors=True)
    return Scores(
        columns={"gate": state["gates"], "score": state["scores"]},
        ranking=order(state["scores"]),
        main="score",
        facts={"gated_kl": state["kl"]},
        cost=Cost(**state["cost"]),
    )


def _trained(probe: Probe) -> dict[str, Any]:
    """Scores, gates, the last KL and the cost; kept until the selection is written."""
    settings = gate_settings(probe.inputs.recipe.logits, probe.settings)
    folder = probe.stage_dir / FOLDER
    gates = Gates(probe.num_layers, probe.keep).to(probe.device)
    with gated(probe, gates, checkpointing=settings.gradient_checkpointing) as student:
        objective = GatesObjective(probe.teacher, student, settings, gates)
        try:
            trained = probe.inputs.train(objective, settings, folder, "select gates")
        except NotFinite as error:
            # The loop's advice is about rates, and there is none to set here.
            raise UserError(f"{error.happened}; choose another select.method") from error
    cost = Cost(trained_tokens=trained.tokens, seconds=trained.seconds)
    state = {
        "scores": gates.scores.tolist(),
        "gates": gates.settled().tolist(),
        "kl": trained.metrics["kl"],
        "cost": vars(cost),
    }
    probe.progress.save(state)
    return state


@contextmanager
def gated(probe: Probe, gates: Gates, *, checkpointing: bool) -> Iterator[LT2ForCausalLM]:
    """The student with both mixers in every layer; as it was afterwards."""
    student, training = probe.student, probe.student.training
    with ExitStack() as stack:
        for index, layer in enumerate(student.model.layers):
            full = fitting(probe.teacher.model.layers[index].mixer, student)
            both = GatedMixer(full, layer.mixer, gates, index)
            stack.enter_context(swapped(student, index, both))
        student.model.gradient_checkpointing = checkpointing
        student.train(checkpointing)  # activations are recomputed in training mode alone
        try:
            yield student
        finally:
            student.model.gradient_checkpointing = False
            student.train(training)
