"""`shard_map`: a function of blocks as a function of global arrays, with layouts at the border.

Decides which arguments are arrays and what is compiled: one program for arguments that are alike, kept by the
function. How one array crosses the border is in `border`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_bridge.arrays.border import Crossing, arrived, entering, leaving
from jax_bridge.arrays.given import mesh_here, mesh_of
from jax_bridge.arrays.leaves import Leaf, is_array, is_layout, of_each
from jax_bridge.arrays.order import remember
from jax_bridge.arrays.primitive import Mesh
from jax_bridge.planning import as_array, free_axes, jax_mesh
from xshard import Profile, XshardError
from xshard.arguments import shown
from xshard.errors import NotationError, located
from xshard.layout.layout import parse_signature
from xshard.plans.expression import sides_or_one


def shard_map(
    f: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    layouts: Any = None,
    *,
    sizes: Mapping[str, int] | None = None,
    check_vma: bool = True,
    donate_argnums: int | Sequence[int] = (),
    profile: str | Path | Profile = "auto",
) -> Callable[..., Any]:
    """A function of blocks -> the function of global arrays, with layouts where `jax.shard_map` has specs.

    layouts: `"layout, layout -> layout"`, one for each positional argument and for each result; or a pair,
    those of the arguments in a tuple and those of the results: each a layout for all arrays of an argument,
    `xshard.Rules` over the names of its leaves, or a pytree prefix with either in the place of a branch (a
    dict is a pytree, no rules). `"layout -> layout"` in the place of one moves an array on its way.
    Outside, an array is whole: `copy(dp)` says that devices use copies of it, `sum(dp)` that they have
    addends of it; halos are filled on the way in and trimmed on the way out; blocks that differ in size are
    padded to the largest. A dim in zigzag or another order is in storage order, as with `reshard`, and
    results remember theirs. An array that is known to be cut otherwise is moved by a plan; one whose rows are
    known to be in another order is refused.
    What is no array, numbers too, has no layout, or None: `f` gets it as it is, and it has to have a hash.
    mesh: by default the arrays' own, or the one of the context. sizes: the lengths of dims by name, needed
    where a result has a dim of another length than arguments have under its name, or of a new name in
    blocks that differ in size.
    check_vma: as for `jax.shard_map`; the layouts say which values vary. Without it they have to say `copy`
    where devices use a whole value differently, or its gradient is wrong.
    donate_argnums: arguments whose memory results may use. profile: the machine to plan for.

    Without `f` this is a decorator. `f` is traced twice, to find the shapes of its results first.
    Raises, while tracing: NotationError, MeshError, ShapeError, DtypeError, PlanError with the name of the
    argument or result; XshardError for arguments or results that the layouts do not fit.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> up = shard_map(lambda x, w: x @ w, mesh, "n d, d f/tp -> n f/tp")
    >>> up(jax.numpy.ones((4, 3)), jax.numpy.ones((3, 2))).sharding.spec
    P(None, 'tp')
    """
    if f is None:
        options: Any = {"sizes": sizes, "donate_argnums": donate_argnums, "profile": profile}
        return partial(shard_map, mesh=mesh, layouts=layouts, check_vma=check_vma, **options)
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    known = None if mesh is None else jax_mesh(mesh)
    bordered = _Bordered(f, known, *_sides(layouts), sizes or {}, check_vma, donated, profile)

    @wraps(f)
    def of_arrays(*args: Any, **static: Any) -> Any:
        return bordered(args, static)

    return of_arrays


def _sides(layouts: Any) -> tuple[Any, Any]:
    """The layouts of arguments and of results, as trees."""
    if isinstance(layouts, str):
        given, made = parse_signature(layouts)
        return given, made[0] if len(made) == 1 else made
    if isinstance(layouts, list | tuple) and len(layouts) == 2:
        return layouts[0], layouts[1]
    raise NotationError(
        f"{shown(layouts)} are no layouts of a function",
        hint='"b s/cp c, c f/tp -> b s/cp f/tp", or a pair: those of the arguments, those of the results',
    )


class _Program(NamedTuple):
    """A jitted function of arrays, how its results cross the border, and what they are part of."""

    run: Callable[..., Sequence[jax.Array]]
    leave: list[Crossing]
    whole: Callable[[Sequence[jax.Array]], Any]


@dataclass(frozen=True, eq=False)
class _Bordered:
    """A function with the layouts at its border, and what is known of its calls so far."""

    f: Callable[..., Any]
    mesh: Mesh | None
    given: Any
    made: Any
    sizes: Mapping[str, int]
    typed: bool
    donated: tuple[int, ...]
    profile: str | Path | Profile
    said: dict[Any, list[Leaf]] = field(default_factory=dict)
    enter: dict[Any, list[Crossing]] = field(default_factory=dict)
    programs: dict[Any, _Program] = field(default_factory=dict)

    def __call__(self, args: tuple[Any, ...], static: Mapping[str, Any]) -> Any:
        names = [*self.names[: len(args)], *map(str, range(len(self.names), len(args)))]
        leaves, tree = jax.tree.flatten({**dict(zip(names, args, strict=True)), **static})
        key: Any = tree, tuple(map(is_array, leaves))
        if key not in self.said:
            self.said[key] = self._said(names, jax.tree.unflatten(tree, leaves))
        said = self.said[key]
        arrays = [
            as_array(x, leaf.name) for x, leaf in zip(leaves, said, strict=True) if leaf.said is not None
        ]
        texts = [sides_or_one(leaf.said).text for leaf in said if leaf.said is not None]
        mesh = mesh_of(arrays, texts) if self.mesh is None else self.mesh
        here = mesh_here(mesh, "".join(texts[:1]))
        rest = [x if leaf.said is None else None for x, leaf in zip(leaves, said, strict=True)]
        typed = tuple((type(x), x) for x in rest)  # True, 1 and 1.0 are equal
        key = key, typed, tuple((x.shape, x.dtype) for x in arrays), here
        try:
            enter = self.enter.get(key)
        except TypeError as error:
            hint = "what is no array is compiled in, and the program kept by it"
            raise XshardError(f"an argument that is no array has no hash: {error}", hint=hint) from None
        if enter is None:
            taken = (leaf for leaf in said if leaf.said is not None)
            enter = self.enter[key] = [
                entering(f"argument '{leaf.name}'", leaf.said, here, x.shape, self.typed)
                for leaf, x in zip(taken, arrays, strict=True)
            ]
        placed = [arrived(x, crossing, mesh, here) for x, crossing in zip(arrays, enter, strict=True)]
        if key not in self.programs:
            self.programs[key] = self._program(names, tree, said, rest, enter, placed, here)
        program = self.programs[key]
        results = zip(program.run(*placed), program.leave, strict=True)
        return program.whole([remember(y, crossing.array) for y, crossing in results])

    @cached_property
    def names(self) -> list[str]:
        """What errors call the positional arguments that the function names."""
        try:
            found = inspect.signature(self.f).parameters.values()
        except (TypeError, ValueError):
            return []
        return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def _said(self, names: Sequence[str], arguments: Mapping[str, Any]) -> list[Leaf]:
        """Every leaf of the arguments, with its layout; None for what is no array."""
        given = self.given if isinstance(self.given, list | tuple) else [self.given] * len(names)
        if len(given) != len(names):
            raise XshardError(
                f"{len(names)} arguments by position, layouts for {len(given)}",
                hint="one for each: a layout, Rules, a tree of these, or None",
            )
        layouts = {**dict.fromkeys(arguments), **dict(zip(names, given, strict=True))}
        leaves = of_each(layouts, arguments, is_layout, has_rule=is_array)
        for leaf in leaves:
            if leaf.said is None and is_array(leaf.x):
                raise XshardError(
                    f"argument '{leaf.name}' is an array without a layout",
                    hint="layouts are for arguments by position, None for what is no array",
                )
        return [leaf._replace(x=None) for leaf in leaves]

    def _program(
        self,
        names: Sequence[str],
        tree: Any,
        said: Sequence[Leaf],
        rest: Sequence[Any],
        enter: Sequence[Crossing],
        placed: Sequence[jax.Array],
        here: Mesh,
    ) -> _Program:
        axes = tuple(free_axes(here))
        taken = [i for i, leaf in enumerate(said) if leaf.said is not None]

        def inside(blocks: Sequence[jax.Array]) -> tuple[list[Any], Any]:
            """What the function makes of a device's blocks, and its structure."""
            leaves = list(rest)
            for i, x, crossing in zip(taken, blocks, enter, strict=True):
                leaves[i] = crossing.across(x, axes, self.profile)
            arguments = jax.tree.unflatten(tree, leaves)
            return jax.tree.flatten(self.f(*[arguments.pop(name) for name in names], **arguments))

        seen: list[Any] = []

        def probe(*blocks: jax.Array) -> tuple[()]:
            leaves, structure = inside(blocks)
            seen[:] = [jax.typeof(y) if is_array(y) else y for y in leaves], structure
            return ()

        border: Any = {"mesh": here, "axis_names": frozenset(axes), "check_vma": self.typed}
        border["in_specs"] = tuple(crossing.source.spec for crossing in enter)
        jax.eval_shape(jax.shard_map(probe, out_specs=(), **border), *placed)
        types, structure = seen
        lengths = defaultdict[str, set[int]](set)
        for crossing in enter:
            for name, n in zip(crossing.array.layout.names, crossing.array.shape, strict=True):
                if not name.startswith("_"):  # a dim of `...` has no name
                    lengths[name].add(n)
        lengths |= {name: {n} for name, n in self.sizes.items()}
        leave: dict[int, Crossing] = {}
        with located("the result"):
            made = of_each(self.made, jax.tree.unflatten(structure, types), is_layout, has_rule=is_array)
        for i, leaf in enumerate(made):
            if is_array(leaf.x):
                place = f"result '{leaf.name}'" if leaf.name else "the result"
                leave[i] = leaving(place, leaf.said, here, leaf.x.shape, self.typed, lengths)

        def local(*blocks: jax.Array) -> list[jax.Array]:
            arrays, _ = inside(blocks)
            return [crossing.across(arrays[i], axes, self.profile) for i, crossing in leave.items()]

        def whole(arrays: Sequence[jax.Array]) -> Any:
            leaves = dict(enumerate(types)) | dict(zip(leave, arrays, strict=True))
            return jax.tree.unflatten(structure, [leaves[i] for i in range(len(types))])

        specs = [crossing.source.spec for crossing in leave.values()]
        owners = {names[i] for i in self.donated}
        donated = [at for at, i in enumerate(taken) if said[i].name.partition(".")[0] in owners]
        run = jax.jit(jax.shard_map(local, out_specs=specs, **border), donate_argnums=donated)
        return _Program(run, list(leave.values()), whole)
