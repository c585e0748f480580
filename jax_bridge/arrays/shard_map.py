"""`shard_map`: a function of blocks as a function of global arrays, with layouts at the border.

At the border overlaps are filled or trimmed, blocks of several sizes padded, and pending reductions
taken.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

import jax

from jax_bridge.arrays.reshard import move_if_needed
from jax_bridge.arrays.stored import ArrayMesh, StoredArray, record_order, stored_sharding
from jax_bridge.calls import JaxLayoutsLike, MoveCall, as_array
from jax_bridge.mesh.context import AnyJaxMesh, free_axes, jax_mesh
from jax_bridge.trees import array_leaves, is_array
from xshard import Layout, Mesh, ProfileLike, Sharding, XshardError
from xshard.errors import NotationError, api_boundary, end_at_user, located
from xshard.layout.layout import check_axes, parse_layouts
from xshard.layout.lengths import Lengths, global_shape
from xshard.notation.maps import Maps
from xshard.notation.parser import mark_errors, with_map_digests
from xshard.plans.expression import Sides, sides_or_one
from xshard.signatures import short_repr
from xshard.trees import Leaf

Function = TypeVar("Function", bound=Callable[..., Any])


class ShardMapKeywords(TypedDict, total=False):
    """The keywords of `shard_map`."""

    sizes: Mapping[str, int] | None
    profile: ProfileLike
    check_vma: bool
    donate_argnums: int | Sequence[int]
    maps: Maps | None


@overload
def shard_map(
    f: Function,
    layouts: JaxLayoutsLike,
    mesh: AnyJaxMesh | None = None,
    **options: Unpack[ShardMapKeywords],
) -> Function: ...


@overload
def shard_map(
    f: None = None,
    *,
    layouts: JaxLayoutsLike,
    mesh: AnyJaxMesh | None = None,
    **options: Unpack[ShardMapKeywords],
) -> Callable[[Function], Function]: ...


@api_boundary
def shard_map(
    f: Callable[..., Any] | None = None,
    layouts: JaxLayoutsLike | None = None,
    mesh: AnyJaxMesh | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    profile: ProfileLike = "auto",
    check_vma: bool = True,
    donate_argnums: int | Sequence[int] = (),
    maps: Maps | None = None,
) -> Callable[..., Any]:
    """Make a function of blocks a function of global arrays: `jax.shard_map` with layouts.

        up = shard_map(lambda x, w: x @ w, "n d, d f/tp -> n f/tp", mesh)
        # inside x: [n, d], w: [d, f/4] on 4 devices; outside w: [d, f]

    Outside, an array is unsharded in meaning: `copy(dp)` says that devices use copies of it,
    `sum(dp)` that they have addends of it. A dim in zigzag or another order is in storage order, as
    with `reshard`. An array that is known to be sharded otherwise is moved by a plan; one known to
    be in another order is refused. `f` is traced twice, to find the shapes of its results first.

    Args:
        f: The function of blocks. Without it this is a decorator. Non-array arguments, numbers
            included, take None as their layout; they are passed through unchanged and must be
            hashable.
        layouts: `"layout, layout -> layout"`, one for each positional argument and for each result;
            or a pair: a tuple for the arguments, and the layouts of the results. Each is a layout
            for all arrays of an argument, `xshard.Rules` over the names of its leaves, or a pytree
            prefix of these. `"layout -> layout"` in the place of a layout moves an array on its
            way.
        mesh: The mesh; by default the arrays' own, or the mesh of the context.
        sizes: Lengths of dims by name. Needed for a result with a dim of another length than
            arguments have under its name, or with a new dim in blocks of several sizes.
        profile: The machine to plan for.
        check_vma: As for `jax.shard_map`. Without it layouts have to say `copy` if devices use an
            unsharded value differently, or its gradient is wrong.
        donate_argnums: Arguments with memory that results may use.
        maps: The `Owners` and `Needs` that layouts name.

    Returns:
        The function of global arrays, or a decorator.

    Raises:
        NotationError: The text is wrong. All errors come while tracing, and name the argument or
            result.
        MeshError: An axis is not in the mesh, or is manual here.
        ShapeError: Lengths disagree, or a result has a length that the layouts do not explain.
        DtypeError: JAX cannot hold an argument.
        PlanError: No plan leads from a layout to another.
        XshardError: The layouts do not fit the arguments or results.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> up = shard_map(lambda x, w: x @ w, "n d, d f/tp -> n f/tp", mesh)
        >>> up(jax.numpy.ones((4, 3)), jax.numpy.ones((3, 2))).sharding.spec
        P(None, 'tp')
    """
    in_layouts, out_layouts = _signature(with_map_digests(layouts, maps))
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        mapped = _MappedFunction(
            f=f,
            in_layouts=in_layouts,
            out_layouts=out_layouts,
            mesh=None if mesh is None else jax_mesh(mesh),
            sizes={} if sizes is None else sizes,
            has_types=check_vma,
            donated=donated,
            profile=profile,
        )

        @wraps(f)
        def of_arrays(*args: Any, **static: Any) -> Any:
            # No `api_boundary`: the arguments are the user's own, and the annotations of `f` are not
            # for us. They may be of blocks, or plain words, and a callable object has none.
            try:
                return mapped(args, static)
            except XshardError as error:
                end_at_user(error)
                raise

        return of_arrays

    # Without a function it is a decorator: @shard_map(layouts=..., mesh=...).
    return decorate if f is None else decorate(f)


def _signature(layouts: Any) -> Sequence[Any]:
    """Return the layouts of arguments and those of results, from one text or from a pair."""
    if isinstance(layouts, str):
        arguments, results = parse_layouts(layouts, "signature")
        # The layout of one result is no tuple: the function returns an array, not a tuple of one.
        return arguments, results[0] if len(results) == 1 else results
    if isinstance(layouts, list | tuple) and len(layouts) == 2:
        return layouts
    hint = (
        '"b s/cp c, c f/tp -> b s/cp f/tp", '
        "or a pair: layouts of the arguments, layouts of the results"
    )
    raise NotationError(f"{short_repr(layouts)} are not layouts of a function", hint=hint)


# Arrays at the border.


class _BorderArray(NamedTuple):
    """One array at the border: the move between its block outside and its block inside, and the array."""

    call: MoveCall
    outside: StoredArray

    def move(self, x: jax.Array) -> jax.Array:
        """Move this device's block on its way in or out."""
        axes = tuple(free_axes(self.outside.mesh.in_context))
        with located(self.outside.path):
            return self.call.run(x, axes)


class _Border(NamedTuple):
    """The border of a `shard_map`: global arrays outside, this device's blocks inside.

    An argument under "n/cp+1:1 d" is split into even blocks by `jax.shard_map`, and then moved to
    blocks with halos, inside, before the function sees them; a result takes the opposite way.
    """

    mesh: ArrayMesh
    has_types: bool
    profile: ProfileLike

    @property
    def axes(self) -> Mesh:
        """The axes that are manual inside: those that no other `shard_map` made manual."""
        return Mesh(free_axes(self.mesh.in_context))

    def argument(self, leaf: Leaf, shape: tuple[int, ...]) -> _BorderArray:
        """Plan how a global argument becomes this device's block as the function takes it.

        Args:
            leaf: Its name, and its layout or "layout -> layout".
            shape: Its global shape.
        """
        path = f"argument '{leaf.name}'"
        with located(path):
            sides = self._resolve_sides(leaf.value, len(shape))
            array = stored_sharding(sides.src, self.axes, shape, sides.text)
            way_in = sides._replace(src=self._layout_at_border(array))
            return self._border_array(array, way_in, path)

    def result(self, leaf: Leaf, lengths: Lengths) -> _BorderArray:
        """Plan how this device's block of a result becomes a part of a global array.

        Args:
            leaf: Its name, its layout or "layout -> layout", and the type of the block.
            lengths: The global lengths of the arguments' dims, by name: a dim of a result that has
                the name of one is as long. A block cannot tell: one of 3 rows on 4 devices may be
                of 12 rows, or padded from 9.
        """
        path = f"result '{leaf.name}'" if leaf.name else "the result"
        with located(path):
            block_shape = leaf.x.shape
            sides = self._resolve_sides(leaf.value, len(block_shape))
            hint = (
                "dims are as long as arguments have them: "
                "take another name, or say sizes={{dim}: ...}"
            )
            shape = global_shape(sides.src, self.axes, block_shape, sides.text, lengths, hint)
            # With "a b -> b a" the array outside has its dims in another order than the block.
            length_of = dict(zip(sides.src.names, shape, strict=True))
            shape_outside = tuple(length_of[name] for name in sides.dst.names)
            array = stored_sharding(sides.dst, self.axes, shape_outside, sides.text)
            way_out = sides._replace(dst=self._layout_at_border(array))
            return self._border_array(array, way_out, path)

    def _resolve_sides(self, layout: Any, ndim: int) -> Sides:
        """Parse a layout, or "layout -> layout", for an array of `ndim` dims, and check its axes."""
        src, dst, text = sides_or_one(layout)
        axes = self.mesh.free((*src.axes, *dst.axes), text)
        with mark_errors(text):
            check_axes(src, axes, text)
            check_axes(dst, axes, text)
            return Sides(src.resolved(ndim), dst.resolved(ndim), text)

    def _layout_at_border(self, array: Sharding) -> Layout:
        """Return the layout of the blocks into which `jax.shard_map` splits a global array.

        It is the array's, with `copy` on the axes that do not shard it if there are no types.
        """
        # With check_vma=False JAX adds the gradients of all devices that hold the value: each uses
        # a copy of its own, which is what the tag `copy` says.
        copies: list[str] = []
        if not self.has_types:
            copies = [axis for axis in self.axes.axes if axis not in array.layout.axes]
        return replace(array.layout, tags=(("copy", tuple(copies)),))

    def _border_array(self, array: Sharding, sides: Sides, path: str) -> _BorderArray:
        """Put together the array outside and the move of its blocks."""
        length_of = dict(zip(array.layout.names, array.shape, strict=True))
        shape = tuple(length_of[name] for name in sides.src.names)
        call = MoveCall(sides, None, shape=shape, profile=self.profile)
        return _BorderArray(call, StoredArray.of(array, self.mesh, sides.text, path))


# The function of blocks, and the program that runs it.


def _is_array_leaf(leaf: Leaf) -> bool:
    """Return whether a leaf of the arguments has a layout (its `value`), and so is an array."""
    return leaf.value is not None


class _Call(NamedTuple):
    """The arguments of one call: arrays, which have layouts, and constants of the program."""

    names: list[str]  # of positional arguments
    tree: Any  # the structure of all arguments, by name
    structure: Any  # the same, and which leaves are arrays
    leaves: list[Leaf]

    @property
    def array_leaves(self) -> list[Leaf]:
        """The leaves that are arrays."""
        return [leaf for leaf in self.leaves if _is_array_leaf(leaf)]

    @property
    def constants(self) -> tuple[Any, ...]:
        """The other leaves, as a part of a key: True == 1 and 0.0 == -0.0 are other constants."""
        constants = []
        for leaf in self.leaves:
            if not _is_array_leaf(leaf):
                is_inexact = isinstance(leaf.x, float | complex)
                constants.append((type(leaf.x), leaf.x, repr(leaf.x) if is_inexact else ""))
        return tuple(constants)

    def without_arrays(self) -> _Call:
        """Return the call without its arrays: a cached program must not keep their memory."""
        leaves = [leaf._replace(x=None) if _is_array_leaf(leaf) else leaf for leaf in self.leaves]
        return self._replace(leaves=leaves)


class _Outputs(NamedTuple):
    """The leaves of a function's result, and their structure."""

    leaves: list[Any]
    structure: Any

    @property
    def types(self) -> _Outputs:
        """The same with the types of arrays in their place; other leaves stay as they are."""
        types = [jax.typeof(leaf) if is_array(leaf) else leaf for leaf in self.leaves]
        return _Outputs(types, self.structure)


@dataclass(frozen=True, eq=False)
class _BlockFunction:
    """The user's function, as a function of one device's blocks as they cross the border."""

    f: Callable[..., Any]
    call: _Call  # with the values of arguments that are not arrays
    arguments: list[_BorderArray]  # for each leaf that is an array

    def __call__(self, blocks: Sequence[jax.Array]) -> _Outputs:
        """Run the user's function on one device's blocks of all array arguments.

        The blocks are moved to the layouts that the function takes (halos filled, say), and put
        back among the arguments that are not arrays.
        """
        blocks_and_arguments = zip(blocks, self.arguments, strict=True)
        values = []
        for leaf in self.call.leaves:
            if _is_array_leaf(leaf):
                block, argument = next(blocks_and_arguments)
                values.append(argument.move(block))
            else:
                values.append(leaf.x)
        by_keyword = jax.tree.unflatten(self.call.tree, values)
        by_position = [by_keyword.pop(name) for name in self.call.names]
        leaves, structure = jax.tree.flatten(self.f(*by_position, **by_keyword))
        return _Outputs(leaves, structure)


class _Program(NamedTuple):
    """A jitted function of all arrays, for calls with the same structure, shapes and constants."""

    arguments: list[_BorderArray]
    run: Callable[..., Sequence[jax.Array]]
    results: dict[int, _BorderArray]  # by the number of the result's leaf
    outputs: _Outputs  # with the leaves that are not arrays

    def result_of(self, arrays: Sequence[jax.Array]) -> Any:
        """Put the arrays that `run` returns into the tree of the result, and record their order."""
        leaves = list(self.outputs.leaves)
        for (i, border), array in zip(self.results.items(), arrays, strict=True):
            leaves[i] = record_order(array, border.outside.array)
        return jax.tree.unflatten(self.outputs.structure, leaves)


@dataclass(frozen=True, eq=False)
class _MappedFunction:
    """A function with the layouts at its border, and its programs for the calls so far."""

    f: Callable[..., Any]
    in_layouts: Any
    out_layouts: Any
    mesh: AnyJaxMesh | None
    sizes: Mapping[str, int]
    has_types: bool
    donated: tuple[int, ...]
    profile: ProfileLike
    # The names and layouts of the arguments' leaves, by the arguments' structure; their `x` is None.
    leaves: dict[Any, list[Leaf]] = field(default_factory=dict)
    programs: dict[Any, _Program] = field(default_factory=dict)

    def __call__(self, args: tuple[Any, ...], static: Mapping[str, Any]) -> Any:
        """Call the function with global arrays, by a program from the cache or a new one.

        Args:
            args: Arguments by position.
            static: Arguments by keyword; they are no arrays, and are compiled in.
        """
        # A call like an earlier one only looks up its program, moves the arrays and runs it.
        call = self._structure_call(args, static)
        arrays = [as_array(leaf.x, leaf.name) for leaf in call.array_leaves]
        texts = [sides_or_one(leaf.value).text for leaf in call.array_leaves]
        mesh = ArrayMesh.of(arrays, texts, self.mesh)
        types = tuple((x.shape, x.dtype) for x in arrays)
        key = (call.structure, call.constants, types, mesh)
        program = self._known_program(key)
        if program is not None:
            placed = _place_arguments(arrays, program.arguments)
            return program.result_of(program.run(*placed))

        border = _Border(mesh, self.has_types, self.profile)
        leaves_and_arrays = zip(call.array_leaves, arrays, strict=True)
        arguments = [border.argument(leaf, x.shape) for leaf, x in leaves_and_arrays]
        # Before the program is made: tracing takes arrays that are sharded as they will be.
        placed = _place_arguments(arrays, arguments)
        of_blocks = _BlockFunction(self.f, call.without_arrays(), arguments)
        program = self._make_program(of_blocks, border, placed)
        self.programs[key] = program
        return program.result_of(program.run(*placed))

    def _known_program(self, key: Any) -> _Program | None:
        """Return the program of an earlier call like this one. Raises XshardError for a key without hash."""
        try:
            return self.programs.get(key)
        except TypeError as error:
            hint = "other arguments than arrays are compiled in, and the program is cached by them"
            reason = f"an argument that is not an array lacks a hash: {error}"
            raise XshardError(reason, hint=hint) from None

    def _structure_call(self, args: tuple[Any, ...], static: Mapping[str, Any]) -> _Call:
        """Name the arguments of a call, flatten them, and give each leaf its layout.

        f(x, {"w": w}) has the leaves "x" and "params.w" if the parameters of `f` are so called.
        """
        names = self.names[: len(args)]
        names += map(str, range(len(names), len(args)))  # *args are named by their positions
        values, tree = jax.tree.flatten({**dict(zip(names, args, strict=True)), **static})
        structure = (tree, tuple(map(is_array, values)))
        if structure not in self.leaves:
            self.leaves[structure] = self._leaves(names, jax.tree.unflatten(tree, values))
        leaves = []
        for leaf, x in zip(self.leaves[structure], values, strict=True):
            leaves.append(leaf._replace(x=x))
        return _Call(names, tree, structure, leaves)

    @cached_property
    def names(self) -> list[str]:
        """The function's names for its positional arguments."""
        try:
            parameters = inspect.signature(self.f).parameters.values()
        except (TypeError, ValueError):
            return []  # some functions in C have no signature
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [parameter.name for parameter in parameters if parameter.kind in positional]

    def _leaves(self, names: Sequence[str], arguments: Mapping[str, Any]) -> list[Leaf]:
        """List the leaves of the arguments, each with its name and its layout.

        f(x, {"w": w}) under "n d, d f" has "x" with "n d" and "params.w" with "d f". A leaf that is
        not an array has None for its layout. The leaves are kept for later calls with the same
        structure: the arguments themselves are not in them, and each `x` is None.

        Args:
            names: The names of the positional arguments.
            arguments: All arguments, by name.

        Raises:
            XshardError: Arguments or arrays lack a layout, or layouts lack arguments.
        """
        layouts = self.in_layouts
        if not isinstance(layouts, list | tuple):
            layouts = [layouts] * len(names)
        if len(layouts) != len(names):
            reason = f"{len(names)} arguments by position, layouts for {len(layouts)}"
            hint = "one for each: a layout, Rules, a tree of these, or None"
            raise XshardError(reason, hint=hint)
        layout_of: dict[str, Any] = dict.fromkeys(arguments)  # None for arguments by keyword
        layout_of |= zip(names, layouts, strict=True)
        leaves = array_leaves(layout_of, arguments)
        for leaf in leaves:
            if is_array(leaf.x) and not _is_array_leaf(leaf):
                hint = "layouts are for arguments by position, None for other arguments than arrays"
                raise XshardError(f"argument '{leaf.name}' is an array without a layout", hint=hint)
        return [leaf._replace(x=None) for leaf in leaves]

    def _make_program(
        self, of_blocks: _BlockFunction, border: _Border, placed: Sequence[jax.Array]
    ) -> _Program:
        """Make the jitted function of global arrays for arguments like `placed`.

        The function is traced twice: once to learn the shapes of its results, from which their
        layouts and specs follow, and once with these specs.

        Args:
            of_blocks: The user's function of blocks.
            border: Plans how blocks of results become global arrays.
            placed: Arrays, sharded as the arguments will be.
        """
        # Inside another `shard_map` its axes are manual already: this one is over the others.
        on_devices = partial(
            jax.shard_map,
            mesh=border.mesh.in_context,
            axis_names=frozenset(border.axes.axes),
            check_vma=self.has_types,
            in_specs=tuple(argument.outside.sharding.spec for argument in of_blocks.arguments),
        )
        outputs = _trace_outputs(of_blocks, on_devices, placed)
        results = self._results(of_blocks, border, outputs)

        def run_on_blocks(*blocks: jax.Array) -> list[jax.Array]:
            """Run the function, and move the arrays of its result out; the rest is constant."""
            leaves = of_blocks(blocks).leaves
            return [result.move(leaves[i]) for i, result in results.items()]

        out_specs = [result.outside.sharding.spec for result in results.values()]
        run = jax.jit(
            on_devices(run_on_blocks, out_specs=out_specs),
            donate_argnums=self._donated_arrays(of_blocks),
        )
        return _Program(of_blocks.arguments, run, results, outputs)

    def _results(
        self, of_blocks: _BlockFunction, border: _Border, outputs: _Outputs
    ) -> dict[int, _BorderArray]:
        """Plan how each array of the result becomes a global array.

        Returns:
            Number of the result's leaf -> its move; leaves that are not arrays have none.
        """
        with located("the result"):
            tree = jax.tree.unflatten(outputs.structure, outputs.leaves)
            leaves = array_leaves(self.out_layouts, tree)
        lengths = self._lengths(of_blocks.arguments)
        results: dict[int, _BorderArray] = {}
        for i, leaf in enumerate(leaves):
            if is_array(leaf.x):
                results[i] = border.result(leaf, lengths)
        return results

    def _lengths(self, arguments: Sequence[_BorderArray]) -> dict[str, set[int]]:
        """Collect the global lengths that dims of results may have, by name.

        Arguments [8, 4] under "n d" and [4, 6] under "d f" -> n: {8}, d: {4}, f: {6}.
        """
        lengths = defaultdict[str, set[int]](set)
        for argument in arguments:
            array = argument.outside.array
            for name, length in zip(array.layout.names, array.shape, strict=True):
                if not name.startswith("_"):  # a dim of `...` is anonymous
                    lengths[name].add(length)
        for name, length in self.sizes.items():
            lengths[name] = {length}  # the user's word counts, whatever arguments have
        return lengths

    def _donated_arrays(self, of_blocks: _BlockFunction) -> list[int]:
        """Return which arrays belong to donated arguments, for `donate_argnums` of `jax.jit`.

        The user counts arguments, the jitted function takes arrays: for f(tree of 2 arrays, x),
        argument 1 is array 2.
        """
        argument_names = of_blocks.call.names
        if any(i >= len(argument_names) for i in self.donated):
            raise XshardError(
                f"donate_argnums is {self.donated}", hint=f"f has {len(argument_names)} arguments"
            )
        donated_names = {argument_names[i] for i in self.donated}
        names = [leaf.name.partition(".")[0] for leaf in of_blocks.call.array_leaves]
        return [i for i, name in enumerate(names) if name in donated_names]


def _place_arguments(
    arrays: Sequence[jax.Array], arguments: Sequence[_BorderArray]
) -> list[jax.Array]:
    """Move global arrays to the shardings in which the jitted function takes them."""
    return [
        move_if_needed(x, argument.outside) for x, argument in zip(arrays, arguments, strict=True)
    ]


def _trace_outputs(
    of_blocks: _BlockFunction, on_devices: Callable[..., Any], placed: Sequence[jax.Array]
) -> _Outputs:
    """Find the types of a function's results, by tracing it inside `shard_map` without results.

    `shard_map` needs the specs of results in advance, and these depend on the shapes of results. So
    the function is traced once only to note its results' types.

    Args:
        of_blocks: The function.
        on_devices: `jax.shard_map` with all arguments but `out_specs`.
        placed: The arrays that it will be called with.
    """
    traced: list[_Outputs] = []

    def probe(*blocks: jax.Array) -> tuple[()]:
        """Run the function while JAX traces, and note the types of its results in `traced`."""
        traced.append(of_blocks(blocks).types)
        return ()  # a result would need a spec

    jax.eval_shape(on_devices(probe, out_specs=()), *placed)
    return traced[-1]
