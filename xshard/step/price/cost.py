"""A cost as a function of a vector of parts: a sum, maxima of sums, and sums with limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xshard.step.price.options import Floats

EXCESS = 1e3  # times the cost, for a limit that is exceeded once over


@dataclass(frozen=True, eq=False)
class CostFunction:
    """`linear @ v + sum(times * max over rows of maxima @ v)` of parts v, where `limited @ v <= 1`.

    A vector of parts v has seconds and bytes of several kinds, which add up over nodes and edges.
    For a step, the maxima are over computing and moving, which overlap, and the limits are bytes of
    a device: 7 GB of at most 10 GB use 0.7 of a limit.

    Args:
        linear: The weight of each part in the sum: [parts].
        times: How often each maximum counts: [maxima].
        maxima: The rows of each maximum: [maxima, rows, parts].
        limit_shares: Each limit's share that one unit of a part uses: [limits, parts]. All numbers are
            >= 0.
    """

    linear: Floats
    times: Floats
    maxima: Floats
    limit_shares: Floats

    def total(self, vectors: Floats) -> Floats:
        """Return the cost of each vector: [..., parts] -> [...]."""
        # Rows go to the end: a max over them is left, one for each maximum and vector.
        highest = (vectors @ self.maxima.swapaxes(1, 2)).max(-1)  # [maxima, ...]
        return np.asarray(vectors @ self.linear + highest.T @ self.times)

    def largest_limit_share(self, vectors: Floats) -> Floats:
        """Return the largest share of a limit that each vector uses; above 1 it does not fit."""
        return np.asarray((vectors @ self.limit_shares.T).max(-1, initial=0.0))

    def rank(self, vectors: Floats, excess: float = EXCESS) -> Floats:
        """Return the cost, plus `excess` times the cost for each time that a limit is exceeded.

        Vectors with infinite parts rank last.
        """
        with np.errstate(invalid="ignore"):  # 0 * inf
            over = np.maximum(self.largest_limit_share(vectors) - 1, 0)
            rank = self.total(vectors) * (1 + excess * over)
        return np.nan_to_num(rank, nan=np.inf)

    def scaled_maxima(self, scale: float) -> Floats:
        """Return the rows of all maxima in the cost, over a scale: [rows, maxima, parts]."""
        return (self.maxima * self.times[:, None, None] / scale).swapaxes(0, 1)

    def weights(self, multipliers: Floats) -> tuple[Floats, float]:
        """Make a linear lower bound of the cost: `weights @ v - constant` is at most that of v.

        v is a vector of parts of the cost, seconds and bytes, and the bound holds for all v within
        the limits (a Lagrangian bound), for two reasons. First, a maximum is at least any mixture:
        max(3, 5) >= 0.5 * 3 + 0.5 * 5. Second, with a limit of 80 GB that is worth 2 s, a plan of
        60 GB pays 1.5 s, and the whole 2 s are subtracted as the constant.

        Returns the weights, [parts], and the constant in seconds.

        Args:
            multipliers: For each maximum a share of each of its rows, 1 in all, as [rows, maxima]
                in a line. Then what a limit is worth, for each limit.
        """
        row_shares, limit_worths = np.split(multipliers, [-len(self.limit_shares)])
        row_shares = row_shares.reshape(-1, len(self.times))  # [rows, maxima]
        # m: maxima, r: rows of each, p: parts.
        of_maxima = np.einsum("rm, m, mrp -> p", row_shares, self.times, self.maxima)
        of_limits = limit_worths @ self.limit_shares
        return of_maxima + self.linear + of_limits, float(limit_worths.sum())
