"""`shard_map`: a function of blocks as a function of global arrays, with layouts at the border. At the border
overlaps are filled or trimmed, blocks of several sizes padded, and pending reductions taken.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh
from jax.sharding import Mesh as JaxMesh

from jax_bridge.arrays.reshard import arrive
from jax_bridge.arrays.stored import ArrayMesh, StoredArray, at_rest, remember
from jax_bridge.calls import BlockCall, as_array
from jax_bridge.mesh.context import free_axes, jax_mesh
from jax_bridge.trees import array_leaves, is_array
from xshard import ProfileLike, XshardError
from xshard.arguments import shown
from xshard.errors import NotationError, located
from xshard.layout.layout import check_axes, parse_layouts
from xshard.layout.lengths import Lengths, global_shape
from xshard.notation.maps import Maps
from xshard.notation.parser import mark_errors, with_maps
from xshard.plans.expression import Sides, sides_or_one
from xshard.trees import Leaf


def shard_map(
    f: Callable[..., Any] | None = None,
    layouts: Any = None,
    mesh: JaxMesh | AbstractMesh | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    profile: ProfileLike = "auto",
    check_vma: bool = True,
    donate_argnums: int | Sequence[int] = (),
    maps: Maps | None = None,
) -> Callable[..., Any]:
    """A function of blocks -> the function of global arrays, with layouts where `jax.shard_map` has specs.

    layouts: `"layout, layout -> layout"`, one for each positional argument and for each result; or a pair: a
    tuple for the arguments, and the layouts of the results. Each is a layout for all arrays of an argument,
    `xshard.Rules` over the names of its leaves, or a pytree prefix of these. `"layout -> layout"` in the
    place of a layout moves an array on its way. Non-array arguments, numbers included, take None; they are
    passed through unchanged and must be hashable.
    Outside, an array is unsharded in meaning: `copy(dp)` says that devices use copies of it, `sum(dp)` that
    they have addends of it. A dim in zigzag or another order is in storage order, as with `reshard`. An array
    that is known to be sharded otherwise is moved by a plan; one known to be in another order is refused.
    mesh: default: the arrays' own, or the one of the context. sizes: lengths of dims by name, needed for a
    result with a dim of another length than arguments have under its name, or with a new dim in blocks of
    several sizes. profile: the machine to plan for. maps: the `Owners` and `Needs` that layouts name.
    check_vma: as for `jax.shard_map`. Without it layouts have to say `copy` if devices use an unsharded value
    differently, or its gradient is wrong. donate_argnums: arguments with memory that results may use.

    Without `f` this is a decorator. `f` is traced twice, to find the shapes of its results first.
    Raises, while tracing: NotationError, MeshError, ShapeError, DtypeError, PlanError with the name of the
    argument or result; XshardError for arguments or results that the layouts do not fit.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> up = shard_map(lambda x, w: x @ w, "n d, d f/tp -> n f/tp", mesh)
    >>> up(jax.numpy.ones((4, 3)), jax.numpy.ones((3, 2))).sharding.spec
    P(None, 'tp')
    """
    layouts = with_maps(layouts, maps)
    if f is None:
        options: Any = {"sizes": sizes, "donate_argnums": donate_argnums, "profile": profile}
        return partial(shard_map, layouts=layouts, mesh=mesh, check_vma=check_vma, **options)
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    own = None if mesh is None else jax_mesh(mesh)
    mapped = _MappedFunction(f, *_signature(layouts), own, sizes or {}, check_vma, donated, profile)

    @wraps(f)
    def of_arrays(*args: Any, **static: Any) -> Any:
        return mapped(args, static)

    return of_arrays


def _signature(layouts: Any) -> tuple[Any, Any]:
    """The layouts of arguments and of results, as trees."""
    if isinstance(layouts, str):
        arguments, results = parse_layouts(layouts, "signature")
        return arguments, results[0] if len(results) == 1 else results
    if isinstance(layouts, list | tuple) and len(layouts) == 2:
        return layouts[0], layouts[1]
    hint = '"b s/cp c, c f/tp -> b s/cp f/tp", or a pair: layouts of the arguments, layouts of the results'
    raise NotationError(f"{shown(layouts)} are not layouts of a function", hint=hint)


class _BorderArray(NamedTuple):
    """One array at the border: the move of its blocks on the way, and the array outside."""

    call: BlockCall
    outside: StoredArray

    def move(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """This device's block on its way. axes: the mesh's."""
        with located(self.outside.path):
            return self.call.run(x, axes)


_Ends = list[_BorderArray]


class _Program(NamedTuple):
    """A jitted function of arrays, its arguments and results at the border, and the tree of results."""

    arguments: _Ends
    run: Callable[..., Sequence[jax.Array]]
    results: _Ends
    tree: Callable[[Sequence[jax.Array]], Any]


@dataclass(frozen=True, eq=False)
class _MappedFunction:
    """A function with the layouts at its border, and its programs for the calls so far."""

    f: Callable[..., Any]
    in_layouts: Any
    out_layouts: Any
    mesh: JaxMesh | AbstractMesh | None
    sizes: Mapping[str, int]
    typed: bool
    donated: tuple[int, ...]
    profile: ProfileLike
    layouts: dict[Any, list[Leaf]] = field(default_factory=dict)
    programs: dict[Any, _Program] = field(default_factory=dict)

    def __call__(self, args: tuple[Any, ...], static: Mapping[str, Any]) -> Any:
        names = [*self.names[: len(args)], *map(str, range(len(self.names), len(args)))]
        values, tree = jax.tree.flatten({**dict(zip(names, args, strict=True)), **static})
        key: Any = tree, tuple(map(is_array, values))
        if key not in self.layouts:
            self.layouts[key] = self._leaves(names, jax.tree.unflatten(tree, values))
        leaves = [leaf._replace(x=x) for leaf, x in zip(self.layouts[key], values, strict=True)]
        taken = [leaf for leaf in leaves if leaf.given is not None]
        arrays = [as_array(leaf.x, leaf.name) for leaf in taken]
        mesh = ArrayMesh.of(arrays, [sides_or_one(leaf.given).text for leaf in taken], self.mesh)
        constants = tuple(
            (type(leaf.x), leaf.x) for leaf in leaves if leaf.given is None
        )  # True equals 1
        key = key, constants, tuple((x.shape, x.dtype) for x in arrays), mesh
        try:
            program = self.programs.get(key)
        except TypeError as error:
            hint = "other arguments than arrays are compiled in, and the program is cached by them"
            raise XshardError(
                f"an argument that is not an array lacks a hash: {error}", hint=hint
            ) from None
        arguments = program.arguments if program else []
        for leaf, x in [] if program else zip(taken, arrays, strict=True):
            arguments.append(self._at_border(mesh, f"argument '{leaf.name}'", leaf.given, x.shape))
        placed = [
            arrive(x, argument.outside) for x, argument in zip(arrays, arguments, strict=True)
        ]
        if program is None:
            program = self.programs[key] = self._program(
                names, tree, leaves, arguments, mesh, placed
            )
        ys = zip(program.run(*placed), program.results, strict=True)
        return program.tree([remember(y, result.outside.array) for y, result in ys])

    @cached_property
    def names(self) -> list[str]:
        """The function's names for its positional arguments."""
        try:
            parameters = inspect.signature(self.f).parameters.values()
        except (TypeError, ValueError):
            return []
        return [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]

    def _leaves(self, names: Sequence[str], arguments: Mapping[str, Any]) -> list[Leaf]:
        """Every leaf of the arguments, without its value, with its layout; None for others than arrays."""
        stated = self.in_layouts
        layouts = stated if isinstance(stated, list | tuple) else [stated] * len(names)
        if len(layouts) != len(names):
            hint = "one for each: a layout, Rules, a tree of these, or None"
            raise XshardError(
                f"{len(names)} arguments by position, layouts for {len(layouts)}", hint=hint
            )
        by_name = {**dict.fromkeys(arguments), **dict(zip(names, layouts, strict=True))}
        leaves = array_leaves(by_name, arguments)
        for leaf in leaves:
            if leaf.given is None and is_array(leaf.x):
                hint = "layouts are for arguments by position, None for other arguments than arrays"
                raise XshardError(f"argument '{leaf.name}' is an array without a layout", hint=hint)
        return [leaf._replace(x=None) for leaf in leaves]

    def _at_border(
        self,
        mesh: ArrayMesh,
        path: str,
        given: Any,
        shape: tuple[int, ...],
        lengths: Lengths | None = None,
    ) -> _BorderArray:
        """A global array on its way in, or blocks on their way out. lengths: results' dims, by name."""
        with located(path):
            src, dst, text = sides_or_one(given)
            axes = mesh.free((*src.axes, *dst.axes), text)
            with mark_errors(text):
                for side in (src, dst):
                    check_axes(side, axes, text)
                src = src.resolved(len(shape))
                dst = dst.resolved(len(shape))
            if lengths is not None:
                hint = "dims are as long as arguments have them: take another name, or say sizes={{dim}: ...}"
                named = dict(
                    zip(src.names, global_shape(src, axes, shape, text, lengths, hint), strict=True)
                )
                shape = tuple(named[name] for name in dst.names)
            array = at_rest(src if lengths is None else dst, axes, shape, text)
            # Without types JAX takes each device's value for its own, also in derivatives: as a `copy`.
            copies = () if self.typed else tuple(a for a in axes.axes if a not in array.layout.axes)
            inside = replace(array.layout, tags=(("copy", copies),) if copies else ())
            both = Sides(inside, dst, text) if lengths is None else Sides(src, inside, text)
            named = dict(zip(array.layout.names, array.shape, strict=True))
            whole = tuple(named[name] for name in both.src.names)
            call = BlockCall(both, None, shape=whole, profile=self.profile)
            return _BorderArray(call, StoredArray.of(array, mesh, text, path))

    def _program(
        self,
        names: list[str],
        tree: Any,
        leaves: list[Leaf],
        arguments: _Ends,
        mesh: ArrayMesh,
        placed: Any,
    ) -> _Program:
        axes = tuple(free_axes(mesh.here))
        taken = [i for i, leaf in enumerate(leaves) if leaf.given is not None]

        def inside(blocks: Sequence[jax.Array]) -> tuple[list[Any], Any]:
            """The leaves and the structure of the function's result for a device's blocks."""
            values = [leaf.x if leaf.given is None else None for leaf in leaves]
            for i, x, argument in zip(taken, blocks, arguments, strict=True):
                values[i] = argument.move(x, axes)
            called = jax.tree.unflatten(tree, values)
            return jax.tree.flatten(self.f(*[called.pop(name) for name in names], **called))

        traced: list[Any] = []

        def probe(*blocks: jax.Array) -> tuple[()]:
            ys, structure = inside(blocks)
            traced[:] = [jax.typeof(y) if is_array(y) else y for y in ys], structure
            return ()

        options: Any = {"mesh": mesh.here, "axis_names": frozenset(axes), "check_vma": self.typed}
        options["in_specs"] = tuple(argument.outside.sharding.spec for argument in arguments)
        jax.eval_shape(jax.shard_map(probe, out_specs=(), **options), *placed)
        types, structure = traced
        results: dict[int, _BorderArray] = {}
        with located("the result"):
            result_leaves = array_leaves(self.out_layouts, jax.tree.unflatten(structure, types))
        lengths = defaultdict[str, set[int]](set)  # that dims of results may have
        for array in (argument.outside.array for argument in arguments):
            for name, n in zip(array.layout.names, array.shape, strict=True):
                if not name.startswith("_"):  # a dim of `...` is anonymous
                    lengths[name].add(n)
        lengths |= {name: {n} for name, n in self.sizes.items()}
        for i, leaf in enumerate(result_leaves):
            if is_array(leaf.x):
                path = f"result '{leaf.name}'" if leaf.name else "the result"
                results[i] = self._at_border(mesh, path, leaf.given, leaf.x.shape, lengths)

        def local(*blocks: jax.Array) -> list[jax.Array]:
            ys, _ = inside(blocks)
            return [result.move(ys[i], axes) for i, result in results.items()]

        def result_tree(arrays: Sequence[jax.Array]) -> Any:
            values = dict(enumerate(types)) | dict(zip(results, arrays, strict=True))
            return jax.tree.unflatten(structure, [values[i] for i in range(len(types))])

        specs = [result.outside.sharding.spec for result in results.values()]
        owners = {names[i] for i in self.donated}
        donated = [k for k, i in enumerate(taken) if leaves[i].name.partition(".")[0] in owners]
        run = jax.jit(jax.shard_map(local, out_specs=specs, **options), donate_argnums=donated)
        return _Program(arguments, run, list(results.values()), result_tree)
