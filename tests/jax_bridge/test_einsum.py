"""`einsum` in JAX: the table of contractions, its traffic, and errors.

A mesh has one program for all of its contractions, since compiling is what takes time.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bridge as xj
import xshard as xs
from jax_bridge.testing.stacked import DeviceProgram, padded, received_bytes, unpadded
from tests.contractions.cases import CASES, spelled
from tests.jax_bridge.helpers import device_mesh, in_jax, placed
from xshard import errors
from xshard.contractions.ring import rings

MESHES = {str(xs.Mesh(mesh)): xs.Mesh(mesh) for _, mesh, _, _ in CASES}


class Case:
    """A contraction of whole numbers: what goes in, what comes out, and what is right."""

    def __init__(self, name, mesh, lengths, expression, overlap="never") -> None:
        self.name, self.mesh, self.lengths = name, xs.Mesh(mesh), lengths
        self.options = {"sizes": lengths, "profile": "bandwidth", "overlap": overlap}
        self.plan = xs.plan(expression, self.mesh, dtype="float64", **self.options)
        self.expression = expression
        ends = self.plan.arrays
        draw = np.random.default_rng(len(expression))
        self.arrays = [draw.integers(-4, 5, end.shape).astype(float) for end in ends]
        duals = [end.with_layout(end.layout.dual) for end in ends]
        self.taken = [*ends[:-1], duals[-1]]
        self.made = [ends[-1], *duals[:-1]]

    @property
    def is_even(self) -> bool:
        moves = [move for part in self.plan.parts for move in (*part.moves, part.result)]
        return all(end.is_even for move in moves for end in (move.source, move.target))

    def blocks(self) -> list[list[np.ndarray]]:
        """Of all devices, of the operands and of the result's cotangent."""
        taken = zip(self.arrays, self.taken, strict=True)
        return [xs.reference.scatter(x, end.layout, self.mesh) for x, end in taken]

    def expected(self) -> list[np.ndarray]:
        """The result, and the gradients of blocks: under `mean`, a share of the array's."""
        numbers = {name: i for i, name in enumerate(self.lengths)}
        later = itertools.count(40)
        ends = [spelled(end.layout) for end in (*self.taken[:-1], self.made[0])]
        apart = [
            x.reshape([self.lengths[n] for n in some])
            for x, some in zip(self.arrays, ends, strict=True)
        ]
        names = [[numbers[n] for n in some] for some in ends]
        pairs = [*zip(apart, names, strict=True)]
        found = [np.einsum(*itertools.chain(*pairs[:-1]), names[-1]).reshape(self.made[0].shape)]
        for i, operand in enumerate(self.taken[:-1]):
            # A dim that the operand alone has: its gradient is repeated along it. Beside diagonals: zeros.
            ones = [(np.ones(self.lengths[n]), [numbers[n]]) for n in ends[i]]
            own = list(names[i])
            for at, n in enumerate(ends[i]):
                if n in ends[i][:at]:
                    own[at] = next(later)
                    ones.append((np.eye(self.lengths[n]), [numbers[n], own[at]]))
            others = itertools.chain(*pairs[:i], *pairs[i + 1 :], *ones)
            found.append(np.einsum(*others, own).reshape(operand.shape) * float(operand.scale))
        return found

    def on_device(self, *blocks: jax.Array, expression=None) -> list[jax.Array]:
        """Blocks of the operands and of the cotangent -> the block of the result, and of the gradients.

        expression: text; by default the plan, which is made by then.
        """
        options = {} if expression is None else self.options
        y, pull = jax.vjp(
            functools.partial(xj.einsum, expression or self.plan, **options), *blocks[:-1]
        )
        return [y, *pull(blocks[-1])]

    def check(self, found: Sequence[Sequence[np.ndarray]]) -> None:
        for i, (blocks, end, expected) in enumerate(
            zip(found, self.made, self.expected(), strict=True)
        ):
            value = xs.reference.gather(blocks, end.layout, self.mesh, end.shape)
            assert np.array_equal(value, expected), (
                self.name,
                "value" if i == 0 else f"gradient {i}",
            )


def run_in_shard_map(cases: Sequence[Case], mode: str = "vma") -> DeviceProgram:
    """Check all cases, of one mesh, in one program."""

    def one_device(*blocks):
        left = iter(blocks)
        return [
            y for case in cases for y in case.on_device(*itertools.islice(left, len(case.taken)))
        ]

    given = [pair for case in cases for pair in zip(case.blocks(), case.taken, strict=True)]
    made = [end for case in cases for end in case.made]
    program = DeviceProgram(one_device, cases[0].mesh, given, made, mode, np.nan)
    found = iter(program.blocks(program()))
    for case in cases:
        case.check([next(found) for _ in case.made])
    return program


def run_along_one_axis(cases: Sequence[Case], mapped) -> None:
    """Check all cases, of one mesh, in one program of `pmap` or `vmap`; NaN in all padding."""

    def one_device(arrays):
        pairs = zip(cases, arrays, strict=True)
        return [case.on_device(*blocks, expression=case.expression) for case, blocks in pairs]

    arrays = [
        [padded(b, end, np.nan) for b, end in zip(c.blocks(), c.taken, strict=True)] for c in cases
    ]
    for case, found in zip(cases, mapped(one_device)(arrays), strict=True):
        case.check([unpadded(np.asarray(y), end) for y, end in zip(found, case.made, strict=True)])


@pytest.mark.parametrize("mesh", MESHES)
@in_jax
def test_the_table_moves_what_is_planned(mesh) -> None:
    """Values, all gradients, and bytes: exactly, where blocks are even; padding travels too."""
    cases = [Case(*case) for case in CASES if xs.Mesh(case[1]) == MESHES[mesh]]
    even = [case for case in cases if case.is_even]
    with jax.enable_x64(True):
        received = run_in_shard_map(even).received_bytes
        if len(even) < len(cases):
            run_in_shard_map([case for case in cases if not case.is_even])
    planned = sum(c.plan.bytes_received + c.plan.backward_bytes_received for c in even)
    # XLA rounds up once for all scalars that it adds up at once.
    assert 0 <= planned - received < 8 * len(even)


# The lengths; the expression; which operand travels in rounds, or None for sums, and the dim cut in parts.
RINGS = (
    ({"s": 16, "d": 4, "f": 32}, "s/dp/tp d, d f/tp -> s/dp f/tp", (0, "s")),
    ({"s": 64, "d": 8, "f": 4}, "s/dp/tp d, d/tp f -> s/dp/tp f", (1, "d")),
    ({"k": 64, "s": 16, "f": 4}, "k/tp s/dp, k/tp f -> s/(dp,tp) f", (None, "s")),
)


def in_rounds(lengths, expression, mesh=(("dp", 2), ("tp", 4))) -> Case:
    return Case(expression, dict(mesh), lengths, expression, "always")


@pytest.mark.parametrize("mode", ["novma", "pmap", "vmap"])
@in_jax
def test_without_types(mode) -> None:
    along_tp = [Case(*case) for case in CASES if case[1] == {"tp": 4}]
    rounds = in_rounds(RINGS[0][0], "s/tp d, d f/tp -> s f/tp", {"tp": 4})
    with jax.enable_x64(True):
        if mode == "novma":
            cases = [Case(*case) for case in CASES if case[1] == {"dp": 2, "tp": 4}][::2]
            run_in_shard_map([*cases, in_rounds(*RINGS[2][:2])], "novma")
        elif mode == "pmap":
            on_devices = functools.partial(jax.pmap, axis_name="tp", devices=jax.devices()[:4])
            uneven = [case for case in along_tp if case.name == "uneven_summed"]
            run_along_one_axis([*along_tp[::8], *uneven, rounds], on_devices)
        else:
            run_along_one_axis(
                [*along_tp[::16], rounds], lambda f: jax.jit(jax.vmap(f, axis_name="tp"))
            )


@in_jax
def test_rounds() -> None:
    """Values, gradients and bytes are those of one collective; no product waits for its round's message."""
    cases = [in_rounds(*ring[:2]) for ring in RINGS]
    parts = [case.plan.parts[0] for case in cases]
    assert [(part.ring.operand, part.ring.dim) for part in parts] == [
        travels for *_, travels in RINGS
    ]
    with jax.enable_x64(True):
        program = run_in_shard_map(cases)
    planned = sum(c.plan.bytes_received + c.plan.backward_bytes_received for c in cases)
    assert program.received_bytes == planned
    # Where an operand travels, no message waits, and round k's product waits for k messages; where sums do, a
    # message waits for the k products before it. A gradient goes the other way.
    found = dependencies(program.compiled.as_text())
    assert found["messages"] == {0: 3 * 3, 1: 3, 2: 3, 3: 3}
    assert found["products"] == {0: 6 + 3 * 4, 1: 6, 2: 6, 3: 6}
    # The same where parts travel in two pieces.
    for case, part in zip(cases, parts, strict=True):
        in_pieces = next(ring for ring in rings(part) if ring.key == (*part.ring.key[:3], 2))
        case.plan = replace(case.plan, parts=(replace(part, ring=in_pieces),))
    with jax.enable_x64(True):
        assert run_in_shard_map(cases).received_bytes == planned


def dependencies(text: str) -> dict[str, Counter[int]]:
    """How many messages wait for how many products, and products for messages; text: optimised HLO."""
    above: dict[str, set[str]] = {}
    called = set()  # computations with a product, as those of fusions are
    for head, body in re.findall(
        r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
    ):
        made: dict[str, set[str]] = {"messages": set(), "products": set()}
        for name, rest in re.findall(r"^ +(?:ROOT )?%([\w.-]+) = (.*)", body, re.MULTILINE):
            refs = set(re.findall(r"%([\w.-]+)", rest))
            above[name] = refs.union(*(above.get(ref, ()) for ref in refs))
            if " dot(" in rest or refs & called:
                made["products"].add(name)
            elif " collective-permute(" in rest:
                made["messages"].add(name)
        if made["products"]:
            called.add(head)
    # The last computation is the program.
    pairs = ("messages", "products"), ("products", "messages")
    return {one: Counter(len(above[x] & made[other]) for x in made[one]) for one, other in pairs}


X = (np.arange(64 * 8, dtype=np.float32) % 7 - 3).reshape(64, 8)
W = (np.arange(8 * 16, dtype=np.float32) % 5 - 2).reshape(8, 16)
LAYER = "n d, d f -> n f/tp"
BOTH = xs.Mesh(dp=2, tp=4)


@pytest.mark.parametrize("where", ["blocks", "arrays"])
@in_jax
def test_gradients_have_derivatives(where) -> None:
    """Of both operands, by one another; blocks differ along an axis that the expression does not name."""
    plan = xs.plan(LAYER, xs.Mesh(tp=4), sizes={"n": 64, "d": 8, "f": 16}, profile="bandwidth")
    if where == "blocks":
        given = np.concatenate([X, X - 1])
        specs = {"in_specs": (P("dp"), P()), "out_specs": P("dp", "tp")}
        einsum = jax.shard_map(functools.partial(xj.einsum, plan), mesh=device_mesh(BOTH), **specs)
    else:
        given = X
        einsum = functools.partial(xj.einsum, plan, mesh=device_mesh(plan.mesh))

    def derivatives(product, x, w):
        first = jax.grad(lambda x, w: (product(x, w) ** 2).sum(), argnums=(0, 1))
        return jax.jvp(first, (x, w), (x % 3, w % 2))

    found = jax.jit(functools.partial(derivatives, einsum))(given, W)
    expected = jax.jit(functools.partial(derivatives, jnp.dot))(given, W)
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(got, right)


@in_jax
def test_operands_without_a_gradient_cost_nothing() -> None:
    """What is not differentiated has no tangent, so that none is moved."""
    plan = xs.plan(LAYER, xs.Mesh(tp=4), sizes={"n": 64, "d": 8, "f": 16}, profile="bandwidth")
    gradient = jax.jit(
        jax.grad(lambda x: (xj.einsum(plan, x, W, mesh=device_mesh(plan.mesh)) ** 2).sum())
    )
    moves = *plan.moves, plan.result, plan.result.backward, plan.moves[0].backward
    received = sum(move.bytes_received for move in moves)
    assert received_bytes(gradient.lower(X).compile().as_text(), 4) == received


@in_jax
def test_global_arrays() -> None:
    mesh = device_mesh(BOTH)
    x = placed(X, mesh, "dp")
    w = placed(W, mesh, None, "tp")
    y = xj.einsum("n/dp d, d f/tp -> n/dp f/tp", x, w)
    assert y.sharding == NamedSharding(mesh, P("dp", "tp")) and np.array_equal(y, X @ W)
    stored = xj.einsum("n/dp d, d f/tp -> n f/zigzag(tp)", x, w)
    assert np.array_equal(xj.reshard(stored, "n f/zigzag(tp) -> n f"), X @ W)
    with pytest.raises(
        errors.ShapeError, match="the rows of the array are stored as 'n f/zigzag\\(tp\\)'"
    ):
        xj.einsum("n f/tp, d f/tp -> n d", stored, w)
    gathered = xj.einsum(
        "n/dp d/tp, d/tp -> n/tp", X, W[:, 0], mesh=mesh, overlap="always", profile="h100"
    )
    assert np.array_equal(gathered, X @ W[:, 0]), (
        "a replica along dp, which no message of a round crosses"
    )
    explicit = functools.partial(
        xj.einsum, "n/dp d, d f -> n/dp f", mesh=device_mesh(BOTH, "Explicit")
    )
    assert np.array_equal(jax.jit(explicit)(X, W), X @ W), "arrays of which JAX knows no mesh"
    wide = xj.einsum(
        "... (h k)/tp, k h/dp f -> ... (h f)/tp", X[None], X[:3].T.reshape(2, 4, 3), mesh=mesh
    )
    right = np.einsum("nhk,khf->nhf", X.reshape(64, 4, 2), X[:3].T.reshape(2, 4, 3))
    assert wide.sharding.spec == P(None, None, "tp") and np.array_equal(
        wide, right.reshape(1, 64, 12)
    )
    assert np.array_equal(
        xj.einsum("d/tp d ... -> ... d/dp", X[:8, :, None], mesh=mesh), X[:8].diagonal()[None]
    )
    batches = jnp.stack([X, 2 * X])
    in_rounds = functools.partial(
        xj.einsum, "n/dp/tp d, d f/tp -> n/dp f/tp", mesh=mesh, overlap="always"
    )
    batched = jax.jit(jax.vmap(lambda x: jax.jvp(in_rounds, (x, w), (x, W % 3))[1]))(batches)
    assert np.array_equal(batched, batches @ W + batches @ (W % 3))


@in_jax
def test_on_explicit_axes_addends_are_unreduced() -> None:
    mesh = device_mesh(BOTH, "Explicit")
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("dp", "tp"))
        w = jax.device_put(W, P("tp"))
        y = xj.einsum("n/dp d/tp, d/tp f -> n/dp f | sum(tp)", x, w)
        assert jax.typeof(y).sharding.spec == P("dp", None, unreduced={"tp"})
        assert np.array_equal(
            xj.einsum("n/dp f | sum(tp), d f -> n/dp d", y, jnp.asarray(W)), X @ W @ W.T
        )
        # One operand is traced there, the other is on devices.
        loss = lambda x: (xj.einsum("n/dp d/tp, d/tp f -> n/dp f/tp", x, w) ** 2).sum()  # noqa: E731
        assert np.array_equal(jax.grad(loss)(x), 2 * X @ W @ W.T)


@in_jax
def test_gradients_of_blocks_that_explicit_axes_cut_besides() -> None:
    """Of a batch of them; both factors of the second gradient are cut along a dim that it sums."""
    with jax.set_mesh(device_mesh(BOTH, "Explicit")):
        cut = P(None, "tp")
        einsum = functools.partial(xj.einsum, "n d, d f/tp -> n f/tp")
        product = jax.shard_map(einsum, in_specs=(P(), cut), out_specs=cut, axis_names={"tp"})
        gradients = jax.grad(lambda x, w: (product(x, w) ** 2).sum(), argnums=(0, 1))
        specs = (X, P(None, "dp")), (W, P(None, None, "tp"))
        x, w = (jax.device_put(np.stack([a, 2 * a]), spec) for a, spec in specs)
        found = jax.jit(jax.vmap(gradients))(x, w)
        assert [jax.typeof(g).sharding.spec for g in found] == [
            P(None, "dp", None),
            P(None, None, "tp"),
        ]
    for got, right in zip(found, (2 * X @ W @ W.T, 2 * X.T @ X @ W), strict=True):
        assert np.array_equal(got, np.stack([right, 8 * right]))


@in_jax
def test_what_the_local_products_are_told() -> None:
    x = X.astype(jnp.bfloat16)
    w = W.astype(jnp.bfloat16)
    expression = "n d/tp, d/tp f -> n f"
    mesh = device_mesh(xs.Mesh(tp=4))
    call = functools.partial(xj.einsum, expression, mesh=mesh)
    told = functools.partial(call, preferred_element_type="float32", precision="highest")
    # The value is kept, or the forward pass is made again: policies see products. All sum the last dim of the
    # first factor, for which XLA:CPU has fast kernels.
    for policy, products in ((jax.checkpoint_policies.dots_saveable, 3), (None, 4)):
        loss = jax.checkpoint(lambda x, w: (told(x, w) ** 2).sum(), policy=policy)
        text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, w).as_text()
        found = re.findall(r"stablehlo.dot_general .*", text)
        assert len(found) == products
        as_told = re.compile(r"= \[1\] x .* = \[HIGHEST, HIGHEST\] .*-> tensor<\w+xf32>")
        assert all(map(as_told.search, found)), found
    assert jax.eval_shape(call, x, w).dtype == jnp.bfloat16
    assert jax.eval_shape(call, x, W).dtype == np.float32
    narrow = [a.astype(np.int8) for a in (x, w)]
    assert (
        jax.eval_shape(functools.partial(call, preferred_element_type=np.int32), *narrow).dtype
        == np.int32
    )


@in_jax
def test_whole_numbers_are_contracted_where_the_result_alone_is_cheapest() -> None:
    """They have no gradients, and need not be where those are cheap."""
    _, _, sizes, expression = next(case for case in CASES if case[0] == "logits_vocab")
    mesh = xs.Mesh(tp=4)
    forward, both = (
        xs.plan(
            expression, mesh, sizes=sizes, dtype="int32", profile="bandwidth", objective=objective
        )
        for objective in ("forward", "forward+backward")
    )
    program = jax.jit(
        functools.partial(xj.einsum, expression, mesh=device_mesh(mesh), profile="bandwidth")
    )
    text = program.lower(*(np.ones(shape, np.int32) for shape in both.shapes)).compile().as_text()
    assert received_bytes(text, 4) == forward.bytes_received < both.bytes_received


LAYOUTS = "n/dp d, d f/tp -> n/dp f/tp"
SIZES = {"n": 64, "d": 8, "f": 16}
PLAN = xs.plan(LAYOUTS, BOTH, sizes=SIZES)
SHAPES = [(64, 8), (8, 16)]
# The expression, the shapes, options; the kind of error, its reason, and the marked part of the text.
WRONG = [
    ("n/dp d, d f -> n f g", SHAPES, {}, "NotationError", "in no operand", "g"),
    ("n/cp d, d f -> n f", SHAPES, {}, "NotationError", "unknown mesh axis 'cp'", "cp"),
    (LAYOUTS, [(64, 8)], {}, "ShapeError", "1 arrays for 2 operands", None),
    (LAYOUTS, [(64, 8), (8, 16, 1)], {}, "ShapeError", "an array of 3 dims", "d f/tp"),
    (LAYOUTS, [(64, 8), (4, 16)], {}, "ShapeError", "is 4 long, elsewhere d=8", "d"),
    ("... d, ... f -> f", [(4, 8), (4, 4, 4)], {}, "ShapeError", "for 1 and for 2 dims", "... f"),
    (
        "n (h k)/tp -> n h",
        [(8, 8)],
        {},
        "ShapeError",
        "is 8 long, elsewhere no part is known",
        "(h k)",
    ),
    (PLAN, SHAPES, {"dtype": "float16"}, "DtypeError", "float16, the plan is for float32", None),
    (PLAN, [(64, 8), (8, 32)], {}, "ShapeError", "(8, 32), not (8, 16)", "d f/tp"),
    (LAYOUTS, SHAPES, {"sizes": {"n": 64, "q": 8}}, "ShapeError", "sizes has dim 'q'", None),
    (LAYOUTS, SHAPES, {"sizes": {"f": 20}}, "ShapeError", "is 16 long, elsewhere f=20", "f"),
    (PLAN, SHAPES, {"sizes": {"f": 20}}, "ShapeError", "is 16 long, elsewhere f=20", "f"),
]


@in_jax
def test_what_is_wrong_is_said_before_anything_is_compiled() -> None:
    mesh = device_mesh(BOTH)
    for expression, shapes, options, kind, reason, marked in WRONG:
        operands = [np.ones(shape, options.get("dtype", "float32")) for shape in shapes]
        with pytest.raises(getattr(xs.errors, kind)) as caught:
            xj.einsum(expression, *operands, mesh=mesh, sizes=options.get("sizes"))
        assert reason in str(caught.value)
        span = caught.value.span
        assert (span and caught.value.text[slice(*span)]) == marked, str(caught.value)
    with pytest.raises(errors.DtypeError, match="PRNG keys cannot be multiplied"):
        xj.einsum("n/dp, n -> n", jax.random.split(jax.random.key(0), 8), jnp.ones(8), mesh=mesh)


@in_jax
def test_blocks_that_do_not_fit_are_marked_in_their_own_operand() -> None:
    def message(expression, x, w, specs, **options) -> list[str]:
        call = functools.partial(xj.einsum, expression, **options)
        program = jax.shard_map(call, mesh=device_mesh(BOTH), in_specs=specs, out_specs=P())
        with pytest.raises(xs.XshardError) as caught:
            jax.eval_shape(program, x, w)
        return str(caught.value).splitlines()

    assert message("n d/dp, d f -> n f", X, W, (P(None, "dp"), P("dp")), sizes=SIZES) == [
        "dim 'd' is 4 long, elsewhere d=8 in",
        "    'n d/dp, d f -> n f'",
        "             ^",
        "  a name stands for one length; sizes= says all of them",
    ]
    assert message("n d/tp, d f -> n f", X, W, (P(None, "tp"), P(None, "tp"))) == [
        "the block varies along 'tp', where the source holds one value in",
        "    'n d/tp, d f -> n f'",
        "             ^^^",
        "  write what it is on the left: sum(tp), mean(tp), or copy(tp) for copies",
    ]


INTEGERS = ("int8", "uint8", "int16", "int32", "uint32", "int64")
DTYPES = (*INTEGERS, "float16", "bfloat16", "float32", "float64", "complex64")
# Three operands: layouts, and as numpy writes it; shapes.
OF_THREE = (
    ("a/dp, a/dp b/tp, b/tp c -> c", "a,ab,bc->c", [(4,), (4, 4), (4, 6)]),
    ("a b/tp, b/tp c, c d/dp -> a d/dp", "ab,bc,cd->ad", [(4, 8), (8, 2), (2, 6)]),
)


@in_jax
def test_operands_of_three_dtypes() -> None:
    """Random triples: the dtype that JAX promotes them to, values and gradients right to its precision."""
    draw = np.random.default_rng(0)
    # XLA adds up no integers in floats of fewer bits: where two of these meet first.
    triples = [("int32", "int32", "bfloat16"), ("int64", "int64", "float32")]
    triples += [tuple(map(str, draw.choice(DTYPES, 3))) for _ in range(5)]
    cases = [*zip(triples, itertools.cycle(OF_THREE), strict=False)]
    mesh = device_mesh(BOTH)

    def values_and_gradients(operands, einsums):
        results = []
        for arrays, einsum in zip(operands, einsums, strict=True):
            floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
            loss = lambda *xs, einsum=einsum: jnp.sum(einsum(*xs).real.astype("float64"))  # noqa: E731
            gradients = jax.grad(loss, floats)(*arrays) if floats else ()
            results.append((einsum(*arrays), *gradients))
        return results

    with jax.enable_x64(True):
        operands = []
        exact = []
        for dtypes, (_, _, shapes) in cases:
            numbers = [draw.integers(0, 3, shape) for shape in shapes]
            operands.append([jnp.asarray(x, d) for x, d in zip(numbers, dtypes, strict=True)])
            # The same types of numbers, wide enough to be exact.
            wide = [np.float64 if jnp.issubdtype(d, jnp.floating) else np.int64 for d in dtypes]
            exact.append([jnp.asarray(x, d) for x, d in zip(numbers, wide, strict=True)])
        sharded = [functools.partial(xj.einsum, case[1][0], mesh=mesh) for case in cases]
        whole = [functools.partial(jnp.einsum, case[1][1]) for case in cases]
        found = jax.jit(lambda xs: values_and_gradients(xs, sharded))(operands)
        right = jax.jit(lambda xs: values_and_gradients(xs, whole))(exact)
        for (dtypes, _), arrays, results, expected in zip(
            cases, operands, found, right, strict=True
        ):
            assert results[0].dtype == jnp.result_type(*arrays), dtypes
            for y, z in zip(results, expected, strict=True):
                close = np.allclose(np.asarray(y).astype(complex), z, rtol=2e-2)
                assert close, (dtypes, y, z)


@in_jax
def test_lengths_by_name_stand_beside_the_arrays() -> None:
    """Of parts of a composed dim, beside `...`, of uneven blocks: for arrays, for blocks, and in plans."""
    mesh = device_mesh(BOTH)
    y = xj.einsum("... (h k)/tp -> ... h", X, mesh=mesh, sizes={"h": 4})
    assert np.array_equal(y, X.reshape(64, 4, 2).sum(-1))

    def on_blocks(expression, shape, specs, **options):
        call = functools.partial(xj.einsum, expression, **options)
        in_blocks = jax.shard_map(call, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
        return jax.jit(in_blocks)(jnp.asarray(X.reshape(shape)))

    specs = P(None, "tp"), P(None, "tp")
    heads = on_blocks("... (h k)/tp -> ... h/tp", (64, 8), specs, sizes={"k": 2})
    assert np.array_equal(heads, X.reshape(64, 4, 2).sum(-1))
    # Of 14 rows each of 4 devices has 4 at most; what is more is padding.
    uneven = on_blocks("n/tp d -> d", (16, 32), (P("tp"), P()), sizes={"n": 14})
    parts = X.reshape(4, 4, 32)
    n_rows = [xs.Sharding("n/tp d", xs.Mesh(tp=4), (14, 32)).local_shape(i)[0] for i in range(4)]
    assert np.array_equal(uneven, sum(x[:n].sum(0) for x, n in zip(parts, n_rows, strict=True)))
    plan = xs.plan("... (h k)/tp -> ... h", xs.Mesh(tp=4), shape=[(64, 8)], sizes={"h": 4})
    assert np.array_equal(xj.einsum(plan, X, mesh=mesh, sizes={"k": 2}), y)


@in_jax
def test_a_mesh_among_the_operands_is_named() -> None:
    with pytest.raises(errors.DtypeError, match="a mesh is passed by its name: mesh=mesh"):
        xj.einsum(LAYER, X, W, device_mesh(BOTH))
