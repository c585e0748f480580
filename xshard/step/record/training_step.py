"""A training step as a value: its operations, parameters and inputs, all dims by name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from xshard.dtypes import name_of
from xshard.errors import PlanError, ShapeError, api_boundary, located
from xshard.formatting import align_columns
from xshard.layout import Layout
from xshard.notation.parser import ARROW, names_of_dim
from xshard.rules import listed_names
from xshard.signatures import did_you_mean
from xshard.step.record.arrays import length_of, parse_arrays, shape_of
from xshard.step.record.op import KINDS, Op


@api_boundary
@dataclass(frozen=True)
class TrainingStep:
    """The forward pass of a training step as operations; the backward pass follows by dual layouts.

    Args:
        ops: The operations, in an order in which they can run.
        lengths: The length of each dim, by name.
        inputs: The dims of each input, by name, as in `{"x": "b c"}`.
        parameters: The dims of each parameter, by name. Names are as in `model.state_dict()`, with
            `*` for the number of a repeated block.
        batch: The dim that micro-batches divide.
        dtype: For activations and parameters in use.
        stored_dtype: For parameters in storage; None: `dtype`.
        reduce_dtype: For sums of their gradients over devices; None: `dtype`.
        moves_anywhere: Activations can move between any two operations, instead of at modules
            (`Op.enters`).

    Raises:
        PlanError: A name does not exist, or comes too late.
        ShapeError: Lengths do not fit.

    Examples:
        >>> up = Op("up", "b c, f c -> b f", ("x", "up.weight"))
        >>> loss = Op("loss", "b f -> ", ("up",), kind="loss")
        >>> lengths = {"b": 64, "c": 128, "f": 512}
        >>> print(
        ...     TrainingStep(
        ...         [up, loss], lengths, inputs={"x": "b c"}, parameters={"up.weight": "f c"}
        ...     )
        ... )
        up    contraction  b c, f c -> b f  x, up.weight
        loss  loss         b f ->           up
    """

    ops: Sequence[Op]
    lengths: Mapping[str, int]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    batch: str = "b"
    dtype: str = "bfloat16"
    stored_dtype: str | None = None
    reduce_dtype: str | None = None
    moves_anywhere: bool = False

    def __post_init__(self) -> None:
        # Values as users write them become plain ones, in a frozen dataclass.
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "dtype", name_of(self.dtype))
        for name in ("stored_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            object.__setattr__(self, name, self.dtype if dtype is None else name_of(dtype))
        self._check_lengths()
        self._check_operations()
        self._check_parameters()

    def _check_lengths(self) -> None:
        """Require positive numbers; other values than whole numbers are refused by the signature."""
        for dim, length in self.lengths.items():
            if length < 1:
                hint = "a length is a whole number >= 1"
                raise ShapeError(f"dim {dim!r} has length {length!r}", hint=hint)

    def _check_operations(self) -> None:
        """Require that operations use arrays made before them, and have names of their own."""
        known = dict.fromkeys((*self.inputs, *self.parameters))  # names in order, for errors
        for name in self.inputs:
            if name in self.parameters:
                raise PlanError(f"{name!r} is an input and a parameter", hint="names are unique")
        for op in self.ops:
            with located(f"operation {op.name}"):
                # The last array is the result's: it has no name here.
                for name, array in zip(op.operands, op.arrays, strict=False):
                    self._check_operand(name, array, known)
                if op.again:  # made by a later operation, when the block ran before
                    self._check_operand(op.again, op.arrays[0], self.by_name)
                if op.name in known:
                    raise PlanError("there is another array of this name", hint="names are unique")
                shape_of(op.arrays[-1], self.lengths)  # raises for a dim without a length
                known[op.name] = None

    def _check_operand(self, name: str, array: Layout, available: Collection[str]) -> None:
        """Require that an operand exists, and is used with the lengths with which it was made.

        An array made as `b c` with lengths (8, 4) may be used as `t d` if t is 8 and d is 4. If d
        is 5, that is a ShapeError; an unknown name is a PlanError.

        Args:
            name: The operand.
            array: Its dims as the operation names them.
            available: Names of arrays that may be used there: inputs, parameters, earlier results.
        """
        if name not in available:
            hint = f"{did_you_mean(name, available)}known here are: {listed_names(list(available))}"
            raise PlanError(f"no array {name!r}", hint=hint)
        made = self.arrays[name]
        made_shape = shape_of(made, self.lengths)
        used_shape = shape_of(array, self.lengths)
        if made_shape != used_shape:
            hint = (
                "an array has the same lengths, by position, where it is made and where it is used"
            )
            reason = f"{name} is '{made}' {made_shape}, used as '{array}' {used_shape}"
            raise ShapeError(reason, hint=hint)

    def _check_parameters(self) -> None:
        """Require that some operation uses each parameter."""
        used = set(chain.from_iterable(op.operands for op in self.ops))
        unused = [name for name in self.parameters if name not in used]
        if unused:
            raise PlanError(f"no operation uses {listed_names(unused)}", hint="leave it out")

    @property
    def batch_length(self) -> int:
        """The length of the batch; 1 if no array has it, as in a loss of parameters alone."""
        return self.lengths.get(self.batch, 1)

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        """The operations by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def arrays(self) -> Mapping[str, Layout]:
        """The dims of every array by its name: of inputs, parameters and results."""
        arrays = {}
        for name, text in (*self.inputs.items(), *self.parameters.items()):
            arrays[name] = parse_arrays(f"{ARROW} {text}")[-1]
        for op in self.ops:
            arrays[op.name] = op.arrays[-1]
        return arrays

    @cached_property
    def units(self) -> Mapping[tuple[str, int], int]:
        """How many units each dim has: {(array, number of its dim): 6}.

        Devices share out whole units where a dim does not divide. A projection makes 96 features
        that attention takes as 6 heads of 16: its weight has 6 units, too. Only dims that are
        sharded together with one of a parameter have units, for the model decides how long these
        are, and not a batch. Without heads they are single rows. Arrays of JAX have even blocks.
        """
        if self.moves_anywhere:
            return {}
        units: dict[tuple[str, int], int] = {}
        for name in self.parameters:
            for number, dim in enumerate(self.arrays[name].dims):
                units[name, number] = length_of(names_of_dim(dim), self.lengths)
        # Dims that are sharded together hand each other their units, from operation to operation,
        # until nothing changes.
        previous: Mapping[tuple[str, int], int] = {}
        while previous != units:
            previous = dict(units)
            for dims in chain.from_iterable(op.dims_sharded_together for op in self.ops):
                # Dims without units count as 0, which no greatest common divisor takes notice of.
                shared_units = math.gcd(*[units.get(dim, 0) for dim in dims])
                if shared_units:
                    lengths = [self.lengths[single_dim] for single_dim in dims.values()]
                    units |= dict.fromkeys(dims, math.gcd(shared_units, *lengths))
        return units

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """The parameters, and the operations that have a gradient because of them."""
        # What a block hands on has a gradient as soon as any of its layers has a parameter.
        reached = {*self.parameters}
        reached.update(op.again for op in self.ops if op.again)
        for op in self.ops:
            has_gradient = op.kind != "source" and not reached.isdisjoint(op.operands)
            if op.again or has_gradient:
                reached.add(op.name)
        return frozenset(reached)

    @cached_property
    def _consumers(self) -> Mapping[str, list[Op]]:
        """The operations that use each array, also as the operand of a carry from the second time on."""
        consumers = defaultdict[str, list[Op]](list)
        for op in self.ops:
            for name in dict.fromkeys((*op.operands, op.again)):
                consumers[name].append(op)
        return consumers

    def consumers(self, name: str) -> list[Op]:
        """List the operations that use an array, each once."""
        return self._consumers[name]

    def entered_module(self, op: Op) -> str:
        """Name the module that begins with an operation; "" if none does."""
        return self._default_module(op) if op.enters is None else op.enters

    def left_module(self, op: Op) -> str:
        """Name the module that ends with an operation; "" if none does."""
        return self._default_module(op) if op.leaves is None else op.leaves

    def _default_module(self, op: Op) -> str:
        """Name an operation with a parameter, which by default is a module of its own; else ""."""
        has_parameter = any(name in self.parameters for name in op.operands)
        return op.name if has_parameter else ""

    def is_saved(self, name: str) -> bool:
        """Tell whether the backward pass of an operation needs this array as its operand."""
        for op in self.consumers(name):
            saved_names = [op.array_names[i] for i in op.saved_operands]
            if name in saved_names:
                return True
        return False

    @cached_property
    def with_shares(self) -> TrainingStep:
        """A copy of this step in which an activation that several operations save is gathered once.

        Without it, q, k and v would each gather the result of a norm. An operation without work is
        put between: `norm -> q, k, v` becomes `norm -> norm (shared) -> q, k, v`. A plan moves the
        activation to "norm (shared)", a share, from which the users take it without a move.
        """
        ops = []
        # By the name of a user: {operand: the share that it takes instead}.
        shares_of_user = defaultdict[str, dict[str, str]](dict)
        for op in self.ops:
            # Operations come in the order in which they run: the shares of all operands are there.
            shares = shares_of_user[op.name]
            operands = tuple(shares.get(name, name) for name in op.operands)
            ops.append(replace(op, operands=operands))
            # Users that save nothing for the backward pass take the array itself: a share would gain
            # them nothing.
            savers = {user.name for user in self.consumers(op.name) if _saves_operands(user)}
            if len(savers) > 1:
                share = self._share_of(op)
                ops.append(share)
                for saver in savers:
                    shares_of_user[saver][op.name] = share.name
        return replace(self, ops=ops)

    def _share_of(self, op: Op) -> Op:
        """Make the operation that hands the result of another one to several."""
        result = op.arrays[-1]
        return Op(
            f"{op.name} (shared)",
            text=f"{result} {ARROW} {result}",
            operands=(op.name,),
            kind="share",
            times=op.times,
            enters="",
            keeps=(0,) if self.is_saved(op.name) else (),
        )

    def __str__(self) -> str:
        rows = []
        for op in self.ops:
            kind = f"{op.kind} x {op.times}" if op.times > 1 else op.kind
            rows.append((op.name, kind, op.text, ", ".join(op.operands)))
        return align_columns(rows)


def _saves_operands(op: Op) -> bool:
    """Tell whether operations of its class save their operands; a share does so only for others."""
    return KINDS[op.kind].saves_operands and op.kind != "share"
