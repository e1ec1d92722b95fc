"""What a selection decided, why, and what it cost: ``selection.json``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ltconvert.distill.records import write_json
from ltconvert.errors import UserError


@dataclass
class Cost:
    """What scoring took.

    Attributes:
        tokens: data tokens that scores were measured on.
        forwards: layer visits over the visits of one whole forward of a batch, added up; a linear
            student's forward counts as one like the teacher's.
        forward_tokens: the same weighted by the tokens of each batch: tokens times whole forwards.
        trained_tokens: tokens of short distillation, over all layers (`kl`, `kl-gates`).
        seconds: wall time, earlier parts of a resumed run included.
    """

    tokens: int = 0
    forwards: float = 0.0
    forward_tokens: float = 0.0
    trained_tokens: int = 0
    seconds: float = 0.0

    def add_visits(self, visits: int, slots: int, tokens: int) -> None:
        """Count ``visits`` of layers of a model with ``slots`` visits a forward, on ``tokens``."""
        self.forwards += visits / slots
        self.forward_tokens += visits / slots * tokens


@dataclass
class Scores:
    """A method's outcome before the chosen set is cut off.

    Attributes:
        columns: per-layer numbers by name; a layer's NaN means that it was never scored.
        ranking: all physical layers, the most valuable first.
        main: the column that a table shows as bars; None where nothing was measured.
        higher_is_better: whether a large value of that column means keep.
        history: the chosen set after every batch (or round).
        stopped_early: the set had settled before the data ran out.
        facts: single numbers worth showing, e.g. the all-linear student's KL.
    """

    columns: dict[str, list[float]]
    ranking: list[int]
    main: str | None
    higher_is_better: bool = True
    history: list[list[int]] = field(default_factory=list)
    stopped_early: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


@dataclass
class Selection:
    """The content of ``selection.json``; layers are physical, a looped layer counts once."""

    method: str
    direction: str | None
    num_layers: int
    loops: int
    keep: int
    chosen: list[int]
    ranking: list[int]
    main: str | None
    higher_is_better: bool
    scores: dict[str, list[float]]
    history: list[list[int]]
    stopped_early: bool
    facts: dict[str, Any]
    cost: Cost
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """The command-line words that use this choice without selecting again."""
        return f"--set student.full_layers=[{','.join(map(str, self.chosen))}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, NaN as None, ready for JSON."""
        plain = asdict(self) | {"set": self.setting}
        plain["scores"] = {
            name: [None if math.isnan(value) else value for value in column]
            for name, column in self.scores.items()
        }
        return plain

    def save(self, path: Path) -> None:
        """Write the file whole, then rename it into place."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Selection:
        """Read a saved selection.

        Raises:
            UserError: no such file, or it is not one that a selection wrote.
        """
        try:
            plain = json.loads(Path(path).read_text())
            plain.pop("set")
            cost = Cost(**plain.pop("cost"))
            columns = {
                name: [float("nan") if value is None else value for value in column]
                for name, column in plain.pop("scores").items()
            }
            return cls(scores=columns, cost=cost, **plain)
        except FileNotFoundError:
            raise UserError(f"no selection at {path}; run the select stage first") from None
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no selection of ltconvert ({type(error).__name__}: {error}); "
                "remove it and select again"
            ) from None
