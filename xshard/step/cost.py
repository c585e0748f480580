"""A cost as a function of parts: a sum, maxima of sums, and limited sums; and weights that bound it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xshard.errors import PlanError
from xshard.step.moves import Floats

TOO_MUCH = 1e3  # times the cost, for a limit that is exceeded once over


@dataclass(frozen=True, eq=False)
class Cost:
    """`linear @ v + sum(times * max over rows of (maxima @ v))` of parts v, where `limited @ v <= 1`.

    linear: [parts]; times: [maxima]; maxima: [maxima, rows, parts]; limited: [limits, parts]; all >= 0.
    """

    linear: Floats
    times: Floats
    maxima: Floats
    limited: Floats

    def of(self, vectors: Floats) -> Floats:
        """The cost of each vector."""
        most = np.moveaxis(np.dot(vectors, np.swapaxes(self.maxima, 1, 2)), -1, 0).max(0)
        total: Floats = vectors @ self.linear + most @ self.times
        return total

    def used(self, vectors: Floats) -> Floats:
        """The largest share of a limit that each vector uses."""
        share: Floats = (vectors @ self.limited.T).max(-1, initial=0.0)
        return share

    def rank(self, vectors: Floats) -> Floats:
        """The cost, and much more for what exceeds a limit."""
        with np.errstate(invalid="ignore"):  # infinite parts
            rank = self.of(vectors) * (1 + TOO_MUCH * np.maximum(self.used(vectors) - 1, 0))
        return np.nan_to_num(rank, nan=np.inf)

    def mixture(self, vectors: Floats) -> tuple[float, Floats, float]:
        """The cost of the best mixture of vectors, the weights of parts that prove it, and a constant.

        Whatever `weights @ v - constant` is at least is a lower bound of the cost within the limits.
        """
        n, t, m = len(vectors), len(self.times), len(self.limited)
        rows = self.maxima.shape[1]
        scale = float(self.of(vectors).min()) or 1.0
        above = np.concatenate([self.maxima[:, r] @ vectors.T for r in range(rows)])
        most = np.tile(-np.eye(t), (rows, 1))
        table = np.block(
            [
                [above, most, np.zeros((rows * t, 1))],
                [self.limited @ vectors.T, np.zeros((m, t)), -np.ones((m, 1))],
            ]
        )
        objective = np.concatenate([vectors @ self.linear, self.times, [TOO_MUCH * scale]]) / scale
        one = np.concatenate([np.ones(n), np.zeros(t + 1)])[None]
        sides = np.concatenate([np.zeros(rows * t), np.ones(m)])
        solved = optimizer().linprog(objective, table, sides, one, [1.0])
        duals = -scale * solved.ineqlin.marginals
        weights = (
            self.linear
            + sum(duals[r * t : (r + 1) * t] @ self.maxima[:, r] for r in range(rows))
            + duals[rows * t :] @ self.limited
        )
        return scale * float(solved.fun), weights, float(duals[rows * t :].sum())


def optimizer() -> Any:
    """scipy's optimizers. Raises PlanError without scipy."""
    try:
        from scipy import optimize
    except ImportError:
        hint = "pip install scipy, or xshard with its extra 'suggest'"
        raise PlanError("a search needs scipy", hint=hint) from None
    return optimize
