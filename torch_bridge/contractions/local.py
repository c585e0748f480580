"""The contraction of one device's blocks by `torch.einsum`, at once or in rounds.

In rounds, one piece of an operand is contracted while the next travels round a ring of devices, or pieces of
the result travel and each device adds its product. Messages are redistributions in flight, which autograd
knows: it runs the rounds backwards.
"""

from __future__ import annotations

import math
import string
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

import torch
from torch import Tensor

from torch_bridge.autodiff.pending import PendingTensor
from torch_bridge.lower.executable import Executable
from xshard.contractions.placements import dim_lengths
from xshard.contractions.plan import Part
from xshard.contractions.ring import ContractionRing

Names = tuple[str, ...]

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True)
class LocalContraction:
    """`torch.einsum` of blocks with named dims. A dim that only the result has is repeated."""

    operands: tuple[Names, ...]
    result: Names
    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, part: Part, device: int) -> LocalContraction:
        """Return the local contraction of a part of a plan on a device."""
        arrays = part.contracted_shardings
        layouts = [array.layout for array in arrays]
        lengths = dim_lengths(layouts, [array.local_shape(device) for array in arrays])
        names = tuple(layout.names for layout in layouts)
        return cls(names, part.result.src.names, tuple(lengths.items()))

    @lru_cache(maxsize=256)  # noqa: B019 (a value, as its results)
    def gradient(self, i: int) -> LocalContraction:
        """Return the gradient of operand `i`: the contraction of the cotangent and the other operands.

        "ij, jk -> ik" has "ik, jk -> ij" for operand 0.
        """
        other_operands = (*self.operands[:i], *self.operands[i + 1 :])
        return LocalContraction((self.result, *other_operands), self.operands[i], self.lengths)

    # Hot: called for every cached einsum.
    def __call__(self, *blocks: Tensor) -> Tensor:
        """Contract blocks in their own dtype, and repeat the result along dims of its own."""
        dtype = blocks[0].dtype
        if dtype in _NARROW:  # torch sums them into int64, and has no product of both
            blocks = tuple(x.long() for x in blocks)
        y = torch.einsum(self._equation, *blocks).to(dtype)
        for d, length in self._repeated_dims.items():
            y = y.unsqueeze(d).expand(*y.shape[:d], length, *y.shape[d:])
        return y

    @cached_property
    def _equation(self) -> str:
        """Return the equation for `torch.einsum` of the blocks, such as "ab,bc->ac".

        Dims have names of any length; each gets one letter here.
        """
        # torch permutes operands to the alphabetical order of the letters of summed dims. Letters
        # in the order of the largest block keep torch from copying that one.
        lengths = dict(self.lengths)

        def n_elements(names: Names) -> int:
            return math.prod(lengths[name] for name in names)

        largest_first = sorted(self.operands, key=n_elements, reverse=True)
        all_names = dict.fromkeys(chain.from_iterable(largest_first))
        # Not strict: there are 52 letters, and most contractions have a few names.
        letters = dict(zip(all_names, string.ascii_letters, strict=False))
        operands = ["".join(letters[name] for name in names) for names in self.operands]
        # A dim that only the result has is left out here: `__call__` adds it afterwards.
        result = "".join(letters[name] for name in self.result if name in letters)
        return f"{','.join(operands)}->{result}"

    @cached_property
    def _repeated_dims(self) -> dict[int, int]:
        """The lengths of the dims that only the result has, by their numbers."""
        names_of_operands = set[str]().union(*self.operands)
        lengths = dict(self.lengths)
        return {
            d: lengths[name] for d, name in enumerate(self.result) if name not in names_of_operands
        }


@dataclass(frozen=True, eq=False)
class Rounds:
    """The blocks of operands -> the local result, one product per piece of a dim.

    One operand travels round the ring piece by piece, or the sums of the result do.

    Attributes:
        local: The contraction of one piece.
        ring: What travels, along which axis, in how many pieces.
        rotation: Passes a piece on to the next device.
        order: The index of the piece of each product, in time: 1, 2, 0 on device 1 of 3.
    """

    local: LocalContraction
    ring: ContractionRing
    rotation: Executable
    order: tuple[int, ...]

    @classmethod
    def of(
        cls,
        gathered_contraction: LocalContraction,
        ring: ContractionRing,
        rotation: Executable | None,
    ) -> Rounds:
        """Return the contraction of gathered operands in the rounds of a ring."""
        assert rotation is not None, "a ring has two devices or more"
        # Each product has an equal part of the dim that travels.
        lengths = dict(gathered_contraction.lengths)
        lengths[ring.dim] //= ring.products
        position = ring.rotation.mesh.index(rotation.processes.device, (ring.axis,))
        order = tuple(ring.order(position))
        local = replace(gathered_contraction, lengths=tuple(lengths.items()))
        return cls(local, ring, rotation, order)

    def __call__(self, *blocks: Tensor) -> Tensor:
        pieces = [self._pieces_by_product(i, block) for i, block in enumerate(blocks)]
        if self.ring.operand is None:
            return self._with_travelling_sums(pieces)
        return self._with_travelling_operand(pieces, self.ring.operand)

    def _pieces_by_product(self, i: int, block: Tensor) -> Sequence[Tensor]:
        """Return the block of operand `i` for each product; if it travels, this device's pieces."""
        names = self.local.operands[i]
        if self.ring.dim not in names:
            return [block] * len(self.order)
        dim = names.index(self.ring.dim)
        if i == self.ring.operand:
            return block.chunk(self.ring.pieces, dim)
        pieces = block.chunk(len(self.order), dim)
        return [pieces[j] for j in self.order]

    def _with_travelling_sums(self, pieces: Sequence[Sequence[Tensor]]) -> Tensor:
        """Compute products while sums travel: each device adds its product; return this process's sums."""
        in_flight = deque[PendingTensor]()
        sums: list[Tensor] = []
        for round_index, blocks in enumerate(zip(*pieces, strict=True)):
            product = self.local(*blocks)
            if round_index >= self.ring.pieces:  # the sums of the first pieces begin here
                product = in_flight.popleft().wait() + product
            if round_index + self.ring.pieces < len(self.order):
                in_flight.append(PendingTensor.begin(product, self.rotation))
            else:
                sums.append(product)
        return self._concatenate(sums)

    def _with_travelling_operand(
        self, pieces: Sequence[Sequence[Tensor]], travelling_operand: int
    ) -> Tensor:
        """Multiply with the pieces of one operand as they come round a ring.

        In each round this device multiplies the piece that it has, and sends it on meanwhile.

        Args:
            pieces: For each operand its block in each product; for the one that travels, the pieces
                that begin on this device.
            travelling_operand: The index of the operand that travels.

        Returns:
            The sum of the products if the ring cuts a dim that is summed, else their concatenation
            along it.
        """
        in_flight = deque[Tensor | PendingTensor](pieces[travelling_operand])
        products: dict[int, Tensor] = {}  # by the number of the piece
        for round_index, piece_index in enumerate(self.order):
            piece = in_flight.popleft()
            block = piece.wait() if isinstance(piece, PendingTensor) else piece
            # Sent on before the product, so that it travels meanwhile. Pieces of the last round
            # have been on all devices, and are not sent any more.
            if round_index + self.ring.pieces < len(self.order):
                in_flight.append(PendingTensor.begin(block, self.rotation))
            operands = [
                block if i == travelling_operand else pieces[i][round_index]
                for i in range(len(pieces))
            ]
            products[piece_index] = self.local(*operands)
        if self.ring.dim not in self.local.result:
            first_product, *other_products = products.values()
            return sum(other_products, start=first_product)
        return self._concatenate([products[piece_index] for piece_index in range(len(products))])

    def _concatenate(self, pieces: Sequence[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(tuple(pieces), self.local.result.index(self.ring.dim))
