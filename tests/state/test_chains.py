"""Names that follow names: a random chain is what its links are in turn, and its inverse undoes it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.state.checkpoints import save
from tests.state.test_transfer import check_arrives
from xshard import Mesh, XshardError, reference
from xshard.state import Names, concat, plan_transfer, rename, split, stack, unstack
from xshard.state.files import open_checkpoint
from xshard.state.files.loading import plan_load, read_block
from xshard.state.names import names_from_json, names_to_json
from xshard.state.parts import ArrayPart

Tree = dict[str, NDArray]

# Stacked experts with gate and up in one, as a trainer has them, and as a checkpoint does.
UNSTACKED = Names(
    unstack("mlp.experts.gate_up", "mlp.experts.*.gate_up"), rename("**", "**", optional=True)
)
HALVED = Names(
    split("mlp.experts.*.gate_up", ["mlp.experts.*.gate", "mlp.experts.*.up"]), rename("**", "**")
)
EXPERTS = UNSTACKED.then(HALVED)
# The same in the other order: gate and up apart, then each unstacked.
EXPERTS_HALVED_FIRST = Names(
    split("mlp.experts.gate_up", ["mlp.gate", "mlp.up"], 1), rename("**", "**")
).then(
    Names(
        unstack("mlp.gate", "mlp.experts.*.gate"),
        unstack("mlp.up", "mlp.experts.*.up"),
        rename("**", "**"),
    )
)
GATE_UP = {"mlp.experts.gate_up": np.arange(3 * 8 * 5).reshape(3, 8, 5)}


def experts(tree: Tree) -> Tree:
    """What the chains above are to make."""
    found = {}
    for i, expert in enumerate(tree["mlp.experts.gate_up"]):
        half = len(expert) // 2
        found[f"mlp.experts.{i}.gate"] = expert[:half]
        found[f"mlp.experts.{i}.up"] = expert[half:]
    return found


# Rows by turns along two dims: neither end's part is a slice of it along either.
TURNS = Names(split("w", ["even", "odd"], rows=(2, 1)), rename("**", "**", optional=True)).then(
    Names(
        split("even", ["even.a", "even.b"], 1, rows=(3, 1), order="i o -> o i"),
        unstack("odd", "odd.*", 1),
        rename("**", "**"),
    )
)
WHOLE = {"w": np.arange(12 * 16).reshape(12, 16)}


def turns(tree: Tree) -> Tree:
    """What `TURNS` is to make."""
    rows = np.arange(12).reshape(4, 3)
    columns = np.arange(16).reshape(4, 4)
    even = tree["w"][rows[:, :2].ravel()]
    odd = tree["w"][rows[:, 2]]
    found = {"even.a": even[:, columns[:, :3].ravel()].T, "even.b": even[:, columns[:, 3]].T}
    return found | {f"odd.{i}": column for i, column in enumerate(odd.T)}


def check_equal(found: Tree, expected: Tree) -> None:
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_rows_by_turns_along_two_dims() -> None:
    check_equal(TURNS.apply(WHOLE), turns(WHOLE))
    check_equal(TURNS.inverse.apply(turns(WHOLE)), WHOLE)


def test_what_is_stacked_and_unstacked_is_as_it_was() -> None:
    """Its parts are whole arrays, which need no dims of their own."""
    names = Names(stack("*.*.w", "*.w")).then(Names(stack("*.w", "w", 1)))
    tree = {f"{i}.{j}.w": np.full((2, 3), 10 * i + j) for i in range(2) for j in range(3)}
    assert names.apply(tree)["w"].shape == (3, 2, 2, 3)
    same = names.then(names.inverse)
    check_equal(same.apply(tree), tree)
    for name, array in same.resolve({name: x.shape for name, x in tree.items()}).items():
        [piece] = array.pieces
        assert piece.src == piece.dst == ArrayPart.whole(name, 2)


@pytest.mark.parametrize("names", [EXPERTS, EXPERTS_HALVED_FIRST], ids=["unstacked", "halved"])
def test_fused_experts_are_split_in_one_transfer_of_the_fewest_bytes(names: Names) -> None:
    check_equal(names.apply(GATE_UP), experts(GATE_UP))
    check_equal(names.inverse.apply(experts(GATE_UP)), GATE_UP)
    trained = "e/ep o/tp i", Mesh(ep=2, tp=2)
    served = "o i/tp", Mesh(tp=3)
    for tree, chain, ends in (
        (GATE_UP, names, (trained, served)),
        (experts(GATE_UP), names.inverse, (served, trained)),
    ):
        (src, src_mesh), (dst, dst_mesh) = ends
        plan = plan_transfer(
            {name: x.shape for name, x in tree.items()},
            ({"**": src}, {"**": dst}),
            names=chain,
            dtypes=dict.fromkeys(tree, "int64"),
            src_mesh=src_mesh,
            dst_mesh=dst_mesh,
            dst_devices=range(2, 2 + dst_mesh.n_devices),
        )
        check_arrives(plan, tree, chain.apply(tree))
        assert plan.bytes_received == plan.bytes_lower_bound


# ---- random chains, by a definition of their own


def joined(parts: Sequence[NDArray], dim: int, rows: Sequence[int] | None) -> NDArray:
    """Parts one after the other, or `rows` of each in turn."""
    if rows is None:
        return np.concatenate(parts, dim)
    groups = parts[0].shape[dim] // rows[0]
    taken = []
    for group in range(groups):
        for part, n in zip(parts, rows, strict=True):
            taken.append(np.take(part, range(group * n, (group + 1) * n), dim))
    return np.concatenate(taken, dim)


def parted(whole: NDArray, n_parts: int, dim: int, rows: Sequence[int] | None) -> list[NDArray]:
    """The parts that `joined` would join."""
    if rows is None:
        return np.split(whole, n_parts, dim)
    numbers = np.arange(whole.shape[dim]) % sum(rows)
    stops = np.cumsum(rows)
    found = []
    for stop, n in zip(stops, rows, strict=True):
        found.append(np.take(whole, np.flatnonzero((stop - n <= numbers) & (numbers < stop)), dim))
    return found


class Chain:
    """A chain of names that grows link by link, and the arrays that it is to make."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tree: Tree = {}
        start = 0
        for name in "ab":
            shape = [self.random.choice((2, 4, 6)) for _ in range(self.random.choice((1, 2, 3)))]
            self.tree[name] = np.arange(start, start + np.prod(shape)).reshape(shape)
            start += self.tree[name].size
        self.source = self.tree
        self.names: Names | None = None
        self.n_made = 0
        for _ in range(self.random.choice((2, 3, 4, 5))):
            link = self.random.choice(
                (self.split, self.concat, self.stack, self.unstack, self.turn)
            )
            link()

    def add(self, relation: object, used: Sequence[str], made: Tree) -> None:
        link = Names(relation, rename("**", "**"))
        self.names = link if self.names is None else self.names.then(link)
        self.tree = {name: x for name, x in self.tree.items() if name not in used} | made

    def new_name(self) -> str:
        self.n_made += 1
        return f"n{self.n_made}"

    def pick(self, ndim: int = 1) -> str:
        fitting = [name for name, x in self.tree.items() if x.ndim >= ndim]
        return self.random.choice(fitting or list(self.tree))

    def group(self, most: int = 3) -> list[str]:
        """Arrays of one shape."""
        shape = self.tree[self.pick()].shape
        alike = [name for name, x in self.tree.items() if x.shape == shape]
        self.random.shuffle(alike)
        return alike[:most]

    def split(self) -> None:
        name = self.pick()
        x = self.tree[name]
        dim = self.random.randrange(x.ndim)
        divisions = [
            (n, rows)
            for n, rows in ((2, None), (3, None), (2, (1, 1)), (2, (2, 1)), (3, (1, 2, 1)))
            if x.shape[dim] % (n if rows is None else sum(rows)) == 0
        ]
        if not divisions:
            return
        n, rows = self.random.choice(divisions)
        parts = [self.new_name() for _ in range(n)]
        made = dict(zip(parts, parted(x, n, dim, rows), strict=True))
        self.add(split(name, parts, dim, rows=rows), [name], made)

    def concat(self) -> None:
        parts = self.group()
        x = self.tree[parts[0]]
        dim = self.random.randrange(x.ndim)
        rows = self.random.choice((None, (1,) * len(parts)))
        order = list(range(x.ndim))
        text = None
        if x.ndim == 2 and self.random.random() < 0.3:
            order = [1, 0]
            text = "o i -> i o"
        name = self.new_name()
        whole = joined([self.tree[part].transpose(order) for part in parts], dim, rows)
        self.add(concat(parts, name, dim, rows=rows, order=text), parts, {name: whole})

    def stack(self) -> None:
        members = self.group()
        if self.tree[members[0]].ndim > 3:
            return
        name = self.new_name()
        renamed = {f"{name}.{i}": self.tree[member] for i, member in enumerate(members)}
        self.add(
            rename("{" + ",".join(members) + "}", "{" + ",".join(renamed) + "}"), members, renamed
        )
        dim = self.random.randrange(self.tree[f"{name}.0"].ndim + 1)
        whole = np.stack(list(renamed.values()), dim)
        self.add(stack(f"{name}.*", name, dim), list(renamed), {name: whole})

    def unstack(self) -> None:
        name = self.pick(2)
        x = self.tree[name]
        if x.ndim < 2:
            return
        dim = self.random.randrange(x.ndim)
        made = {f"{name}m.{i}": np.take(x, i, dim) for i in range(x.shape[dim])}
        self.add(unstack(name, f"{name}m.*", dim), [name], made)

    def turn(self) -> None:
        name = self.pick(2)
        x = self.tree[name]
        order = list(range(x.ndim))
        self.random.shuffle(order)
        text = f"{' '.join('xyzuv'[: x.ndim])} -> {' '.join('xyzuv'[i] for i in order)}"
        made = self.new_name()
        self.add(rename(name, made, text), [name], {made: x.transpose(order)})

    def layouts(self, tree: Tree, axis: str) -> dict[str, str]:
        """A layout for each array, which cuts one of its dims, in one of several orders."""
        found = {}
        for name, x in tree.items():
            dims = [f"{axis}{i}" for i in range(x.ndim)]  # names of either end's own
            cut = self.random.randrange(x.ndim + 1)
            if cut < x.ndim:
                dims[cut] += self.random.choice(
                    (f"/{axis}", f"/cyclic({axis},1)", f"/zigzag({axis})")
                )
            found[name] = " ".join(dims)
        return found


def chains(n: int) -> list[Chain]:
    made = [Chain(seed) for seed in range(n)]
    return [chain for chain in made if chain.names is not None and chain.names.links]


def test_a_random_chain_is_its_links_in_turn_and_its_inverse_undoes_it() -> None:
    n_cut_twice = 0
    for chain in chains(25):
        assert chain.names is not None
        check_equal(chain.names.apply(chain.source), chain.tree)
        check_equal(chain.names.inverse.apply(chain.tree), chain.source)
        again = names_from_json(json.loads(json.dumps(names_to_json(chain.names))))
        check_equal(again.apply(chain.source), chain.tree)
        check_equal(again.inverse.apply(chain.tree), chain.source)
        shapes = {name: x.shape for name, x in chain.source.items()}
        for array in chain.names.resolve(shapes).values():
            for piece in array.pieces:
                n_cut_twice += sum(rows is not None for _, rows in piece.src.dims) > 1
    assert n_cut_twice > 4


def test_random_chains_are_one_transfer_of_the_fewest_bytes() -> None:
    for chain in chains(12):
        shapes = {name: x.shape for name, x in chain.source.items()}
        rules = chain.layouts(chain.source, "dp"), chain.layouts(chain.tree, "tp")
        plan = plan_transfer(
            shapes,
            rules,
            names=chain.names,
            dtypes=dict.fromkeys(shapes, "int64"),
            src_mesh=Mesh(dp=3),
            dst_mesh=Mesh(tp=2),
            dst_devices=(2, 3),
        )
        check_arrives(plan, chain.source, chain.tree)
        assert plan.bytes_received == plan.bytes_lower_bound


def test_random_chains_are_saved_and_loaded_under_the_first_names(tmp_path: Path) -> None:
    mesh = Mesh(dp=3)
    for i, chain in enumerate(chains(8)):
        path = tmp_path / str(i)
        save(path, chain.source, chain.layouts(chain.source, "dp"), mesh, chain.names)
        layouts = chain.layouts(chain.source, "dp")
        with open_checkpoint(path) as checkpoint:
            check_equal({name: checkpoint.read(name) for name in checkpoint}, chain.tree)
            assert checkpoint.names is not None
            loads = plan_load(checkpoint, layouts, mesh, checkpoint.names.inverse)
            for name, load in loads.items():
                expected = reference.scatter(chain.source[name], load.source.layout, mesh)
                for device, wanted in enumerate(expected):
                    np.testing.assert_array_equal(read_block(checkpoint, load, device), wanted)


# ---- errors


@pytest.mark.parametrize(
    ("names", "shapes", "reason"),
    [
        (EXPERTS, {"mlp.experts.gate_up": (3, 7, 5)}, "^link 2 of the names: .*dim 0 of 7 rows"),
        (
            EXPERTS.inverse,
            {"mlp.experts.0.gate": (4, 5)},
            "^link 1 of the names: .*no mlp.experts.0.up",
        ),
        (
            EXPERTS.then(Names(rename("mlp.expert.*.up", "*"), rename("**", "**"))),
            {"mlp.experts.gate_up": (3, 8, 5)},
            "^link 3 of the names: 'mlp.expert.\\*.up -> \\*' fits no name\n  .*did you mean",
        ),
        (UNSTACKED.then(Names(rename("a", "b"))), {"c": (2,)}, "^link 1 of the names: "),
    ],
)
def test_the_link_that_does_not_fit_is_named(names: Names, shapes: dict, reason: str) -> None:
    with pytest.raises(XshardError, match=reason):
        names.resolve(shapes)


def test_a_link_that_is_no_list_of_relations_is_shown() -> None:
    [first, second] = names_to_json(EXPERTS)
    for wrong in ([first, second[0]], [first, [second]], [[[[]]]]):
        with pytest.raises(XshardError, match="is not a relation"):
            names_from_json(wrong)


def test_the_last_link_of_a_chain_casts() -> None:
    named = Names(rename("w", "v"))
    half = Names(rename("v", "u", dtype="float16"))
    assert named.then(half).apply({"w": np.ones(2)})["u"].dtype == np.float16
    with pytest.raises(
        XshardError, match=r"^.v -> u. casts to float16, and other names follow\n  cast in"
    ):
        named.then(half).then(Names(rename("u", "t")))
