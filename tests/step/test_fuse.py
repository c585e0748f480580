"""Options of chains against all assignments of their operations; names of repeated blocks."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from xshard import Mesh, Op, TrainingStep, load_profile, suggest
from xshard.step.price.moves import MovePrices
from xshard.step.price.options import options_of
from xshard.step.price.problem import StepProblem
from xshard.step.record.arrays import COPY, REPLICAS, SUM
from xshard.step.record.fuse import fuse_operations
from xshard.step.record.letters import LetteredOp
from xshard.step.record.repeat import find_repeated
from xshard.step.record.trace import Trace

LENGTHS = {"b": 2, "c": 4, "d": 2, "e": 4}


def random_chain(seed, *, coarse, anywhere):
    """Views, permutations, functions of elements, sums and products, without places where something moves.

    coarse: dims that stay one dim throughout an operation have one name there.
    """
    pick = random.Random(seed)
    ops = []
    lengths = dict(LENGTHS)
    arrays = {"x": [["b"], ["c"], ["d"]]}
    parameters = {}

    def text_of(groups):
        return " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups) or "()"

    def add(operands, result, kind, **how):
        name = f"op{len(ops)}"
        all_groups = [*(arrays[o] for o in operands), result]
        together = (
            {tuple(g) for groups in all_groups for g in groups if len(g) > 1} if coarse else set()
        )
        for group in list(together):
            own = [g for groups in all_groups for g in groups if set(g) & set(group)]
            if any(tuple(g) != group for g in own):
                together.discard(group)
        lengths.update({"".join(g): math.prod(LENGTHS[n] for n in g) for g in together})
        texts = [
            text_of([["".join(g)] if tuple(g) in together else g for g in groups])
            for groups in all_groups
        ]
        text = f"{', '.join(texts[:-1])} -> {texts[-1] if result else ''}"
        ops.append(Op(name, text, tuple(operands), kind, enters="", leaves="", **how))
        arrays[name] = result
        return name

    here = "x"
    for _ in range(pick.choice((3, 4, 5))):
        groups = arrays[here]
        flat = [n for g in groups for n in g]
        what = pick.choice(("view", "permute", "pointwise", "add", "source", "product", "sum"))
        if what == "view":
            cuts = [i for i in range(1, len(flat)) if pick.random() < 0.5]
            ends = list(zip([0, *cuts], [*cuts, len(flat)], strict=True))
            here = add([here], [flat[i:j] for i, j in ends if i < j], "linear", accesses=0.0)
        elif what == "permute":
            here = add([here], pick.sample(groups, len(groups)), "linear", accesses=0.0)
        elif what == "pointwise":
            here = add([here], groups, "pointwise")
        elif what == "add":
            there = pick.choice([n for n in arrays if arrays[n] == groups])
            here = add(list(dict.fromkeys([here, there])), groups, "linear")
        elif what == "source":
            here = add([here, add([], groups[-1:], "source")], groups, "pointwise")
        elif what == "sum" and len(groups) > 2:
            here = add([here], groups[:-1], "linear")
        elif len(groups[-1]) == 1 and "e" not in flat:
            name = f"w{len(parameters)}"
            arrays[name], parameters[name] = [["e"], groups[-1]], f"e {groups[-1][0]}"
            here = add([here, name], [*groups[:-1], ["e"]], "contraction")
    add([here], [], "loss")
    step = TrainingStep(ops, lengths, {"x": "b c d"}, parameters, moves_anywhere=anywhere)
    used = {o for op in ops for o in op.operands} | {ops[-1].name}
    return None if {op.name for op in ops} - used else step


def members(step, name, left):
    """The operations that one of the fused step has taken in."""
    own = [name]
    for operand in step.by_name[name].operands:
        if operand in step.by_name and operand not in left:
            own += [each for each in members(step, operand, left) if each not in own]
    return own


def brute_force(step, one, left, mesh):
    """The options of a joined operation, by all assignments of rules to its members."""
    own = sorted(members(step, one.name, left), key=list(step.by_name).index)
    rules = []
    found = set()
    for name in own:
        op = step.by_name[name]
        rules.append([*op.axis_rules, *([(COPY,) * len(op.arrays)] if name != one.name else [])])
    for chosen in product(*rules):
        at = dict(zip(own, chosen, strict=True))
        layouts = {}
        uses = [(o, w) for n in own for o, w in zip(step.by_name[n].operands, at[n], strict=False)]
        if all(layouts.setdefault(o, w) == w for o, w in [*((n, at[n][-1]) for n in own), *uses]):
            found.add((*(layouts[o] for o in one.operands), at[one.name][-1]))
    *operands, result = (str(step.arrays[name]) or "()" for name in (*one.operands, one.name))
    text = f"{', '.join(operands)} -> {result.strip('()') and result}"
    return options_of(Op("one", text, one.operands, rules=tuple(found)), step.lengths, mesh)


@pytest.mark.parametrize("anywhere", [False, True])
def test_options_of_a_chain_are_those_of_all_assignments(anywhere):
    """Dims with one name together are not sharded apart where only the name of both is summed."""
    joined = 0
    found = [0, 0]
    mesh = Mesh(x=2, y=2)
    for seed in range(20):
        if (fine := random_chain(seed, coarse=False, anywhere=anywhere)) is None:
            continue
        for step in (fine, random_chain(seed, coarse=True, anywhere=anywhere)):
            new = fuse_operations(step)
            for one in new.ops:
                if len(set(one.operands)) == len(one.operands):
                    options = (
                        options_of(one, new.lengths, mesh),
                        brute_force(fine, one, new.by_name, mesh),
                    )
                    got, want = ({tuple(option.flat) for option in each} for each in options)
                    assert got == want if step is fine else got <= want, (seed, one.name, step)
                    found = [found[0] + len(got), found[1] + len(want)]
                    joined += len(members(step, one.name, new.by_name)) > 1
        assert abs(_flops(fuse_operations(fine)) - _flops(fine)) < 1e-9 * _flops(fine)
        assert _kernels(fuse_operations(fine)) == _kernels(fine)
    assert joined > 20 and found[0] > 0.98 * found[1], found


def _flops(step):
    def space(op):
        return math.prod(step.lengths[n] for n in {n for dims in op.dims for n in dims})

    return 1 + sum(op.work.flops * space(op) for op in step.ops)


def _kernels(step):
    return sum(op.kernels for op in step.ops if op.work.accesses)


def test_a_chain_of_constants_is_a_copy_where_more_dims_are_broadcast():
    """Positions, as many as an input has, are broadcast to its rows: they have no gradient to be added up."""
    ops = [
        Op("mask", "b c -> d", ("x",), "source", rules=((0, -1),), enters="", leaves=""),
        Op(
            "rows",
            "d, b c -> b d",
            ("mask", "x"),
            "source",
            rules=((COPY, 0, 0),),
            enters="",
            leaves="",
        ),
        Op("masked", "b d, b d -> b d", ("y", "rows"), "pointwise", enters="", leaves=""),
    ]
    step = TrainingStep(ops, LENGTHS, {"x": "b c", "y": "b d"}, {})
    (op,) = fuse_operations(step).ops
    assert "b/x d, b/x c -> b/x d" in map(op.text_of, op.axis_rules)


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (("b c, c -> b c", ("x", "first.weight")), ("x", "first")),
        (("c -> c", ("first.weight",)), ("x",)),
    ],
)
def test_modules_with_parameters_of_their_own_stay_apart(first, kept):
    """Each has a rule where activations differ more than around it; one without an input has none."""
    ops = [
        Op("first", *first, "pointwise"),
        Op(
            "second",
            "b c, c -> b c",
            (kept[-1], "second.weight" if kept[1:] else "first"),
            "pointwise",
        ),
    ]
    parameters = {name: "c" for op in ops for name in op.operands if "weight" in name}
    loss = Op("loss", "b c ->", ("second",), "loss")
    step = fuse_operations(TrainingStep([*ops, loss], LENGTHS, {"x": "b c"}, parameters))
    assert [op.name for op in step.ops] == ["first", "second", "loss"]


def layers(names):
    ops = []
    parameters = {}
    here = "x"
    for name in names:
        weight = f"{name}.up.weight"
        parameters[weight] = "d c"
        ops.append(
            Op(
                f"{name}.act",
                "b d -> b d",
                (here,),
                "pointwise",
                accesses=0.0,
                enters=name,
                leaves="",
            )
        )
        ops.append(Op(f"{name}.up", "b c, d c -> b d", (f"{name}.act", weight)))
        here = f"{name}.up"
    return TrainingStep(
        [*ops, Op("loss", "b d ->", (here,), "loss")],
        {"b": 8, "c": 4, "d": 4},
        {"x": "b c"},
        parameters,
    )


def test_blocks_are_named_by_their_numbers():
    """A star is for all layers; beside others of the same names, the numbers are there."""
    step, names = find_repeated(layers(["0", "1", "2"]))
    assert names["2.up"] == "*.up" and list(step.parameters) == ["*.up.weight"]
    assert [op.times for op in step.ops] == [3] * (len(step.ops) - 1) + [1]
    other = layers(["0", "1", "2"])
    ops = [op if op.name != "0.up" else replace(op, flops=3.0) for op in other.ops]
    step, names = find_repeated(replace(other, ops=ops))
    assert names["2.up"] == "{1,2}.up" and set(step.parameters) == {
        "0.up.weight",
        "{1,2}.up.weight",
    }
    carry = next(op for op in step.ops if op.again)
    assert (carry.name, carry.operands, carry.again) == ("{1,2}.act", ("0.up",), "{1,2}.up")
    problem = StepProblem(step, MovePrices(Mesh(x=2), "float32", load_profile("h100")))
    assert {edge.place for edge in problem.edges if edge.enters} >= {"0", "1", "{1,2}"}


def groups_of_layers(kinds):
    """Layers of two kinds, such as "aabaab": b is wider inside. One moves what a would keep."""
    ops = []
    parameters = {}
    here = "x"
    for number, kind in enumerate(kinds):
        name = f"layers.{number}"
        inside = {"a": "d", "b": "e"}[kind]
        up, down = f"{name}.{kind}.up", f"{name}.{kind}.down"
        parameters |= {f"{up}.weight": f"{inside} c", f"{down}.weight": f"c {inside}"}
        begin = {"enters": name, "leaves": "", "accesses": 0.0}
        ops += [
            Op(f"{name}.in", "b c -> b c", (here,), "linear", **begin),
            Op(up, f"b c, {inside} c -> b {inside}", (f"{name}.in", f"{up}.weight")),
            Op(down, f"b {inside}, c {inside} -> b c", (up, f"{down}.weight"), leaves=name),
        ]
        here = down
    parameters["norm.weight"] = "c"
    ops += [
        Op("norm", "b c, c -> b c", (here, "norm.weight"), "pointwise", whole=("c",)),
        Op("loss", "b c ->", ("norm",), "loss"),
    ]
    lengths = {"b": 256, "c": 1024, "d": 512, "e": 8192}
    return TrainingStep(ops, lengths, {"x": "b c"}, parameters)


@pytest.mark.parametrize(("kinds", "n_ops"), [("aabaabaab", 9), ("aabaabaaba", 12), ("abab", 6)])
def test_a_group_of_layers_of_several_kinds_is_one_block(kinds, n_ops):
    """The plan of the groups takes the seconds of the plan in which each layer is by itself."""
    machine = load_profile("h100")
    links = {name: replace(getattr(machine, name), latency_s=0.0) for name in ("default", "across")}
    free = replace(machine, **links, launch_s=tuple((kind, 0.0) for kind, _ in machine.launch_s))
    apart = groups_of_layers(kinds)
    folded, _ = find_repeated(apart)
    assert len(folded.ops) == n_ops + 2  # norm and loss
    options = {"micro_batches": 1, "recompute": False, "overlap": 0.0}
    grouped, alone = (suggest(step, Mesh(x=2), profile=free, **options) for step in (folded, apart))
    rules = grouped.parameters
    # The rules cost the same, layer by layer. The search for fewer rules may end elsewhere.
    sides = {"inputs": grouped.inputs, "outputs": grouped.outputs, "once": grouped.once}
    assert alone.estimate(rules, **sides).seconds == pytest.approx(grouped.seconds, rel=1e-12)
    if kinds == "aabaabaab":
        assert grouped.seconds == pytest.approx(alone.seconds, rel=1e-12)
    assert grouped.seconds <= 1.003 * alone.seconds
    size = kinds.index("b") + 1
    for number in range(len(kinds) // size * size):
        # A rule for each layer, as for others at its place of a group.
        kind = kinds[number]
        place = number % size
        rule = rules.find(f"layers.{number}.{kind}.up.weight")
        assert rule is not None
        assert rule == rules.find(f"layers.{place}.{kind}.up.weight")


def test_a_loop_inside_a_repeated_block_begins_in_each():
    """Four rounds in each of three layers: the loop takes what is before it three times in twelve."""
    ops = []
    parameters = {}
    here = "x"
    for layer in range(3):
        parameters[f"{layer}.weight"] = "c"
        ops.append(Op(f"{layer}", "b c, c -> b c", (here, f"{layer}.weight"), "pointwise"))
        here = f"{layer}"
        for turn in range(2, 6):
            name = f"{layer}.loop:sin_{turn}"
            ops.append(Op(name, "b c -> b c", (here,), "pointwise", enters="", leaves=""))
            here = name
    step = TrainingStep(
        [*ops, Op("loss", "b c ->", (here,), "loss")], {"b": 8, "c": 4}, {"x": "b c"}, parameters
    )
    folded, names = find_repeated(step)
    carries = {op.operands: (op.again, op.starts, op.times) for op in folded.ops if op.again}
    last = names["2.loop:sin_5"]
    assert carries == {("x",): (last, 1, 3), ("{0,1,2}",): (last, 3, 12)}
    problem = StepProblem(folded, MovePrices(Mesh(x=2), "float32", load_profile("h100")))
    runs = {}  # of moves in the forward pass, by the names of both ends
    for edge in problem.edges:
        ends = (problem.nodes[edge.source].name, problem.nodes[edge.user].name)
        runs[ends] = float(edge.runs[0, 0, 0] * folded.by_name[ends[1]].times)
    (loop,) = [op.name for op in folded.ops if op.operands == ("{0,1,2}",)]
    assert runs["{0,1,2}", loop] == pytest.approx(3)
    assert runs[last, loop] == pytest.approx(9)


def test_a_block_that_takes_more_than_the_one_before_it_is_not_repeated():
    step = layers(["0", "1", "2"])
    ops = [op if op.name != "2.act" else replace(op, operands=("0.up",)) for op in step.ops]
    both = Op("sum", "b d, b d -> b d", ("1.up", "2.up"), "linear")
    apart, names = find_repeated(
        replace(step, ops=[*ops[:-1], both, Op("loss", "b d ->", ("sum",), "loss")])
    )
    assert not names and all(op.times == 1 for op in apart.ops)


def test_an_operation_without_floating_point_operations_stays_so_in_a_chain():
    ops = [
        Op("pick", "b c, c d -> b d", ("x", "w"), flops=0.0, enters="", leaves=""),
        Op("view", "b d -> d b", ("pick",), "linear", accesses=0.0, enters="", leaves=""),
        Op("loss", "d b -> ", ("view",), "loss"),
    ]
    step = TrainingStep(ops, {"b": 4, "c": 4, "d": 4}, {"x": "b c"}, {"w": "c d"})
    assert [op.work.flops for op in fuse_operations(step).ops if op.kind == "contraction"] == [0.0]


def test_tags_of_an_array_whose_lengths_are_read_mean_nothing():
    """`zeros(y.shape[0], 3)` follows shards of y; that y has partial sums costs no move."""
    trace = Trace(batch=8)
    x = trace.input("x", (8, 4))
    w = trace.parameter("w", (6, 4))
    y = trace.add("y", LetteredOp(["ac", "dc", "ad"], "contraction"), (x, w), (8, 6))
    zeros = trace.add(
        "zeros", LetteredOp(["aw", "ae"], "source", n_length_operands=1), (y,), (8, 3)
    )
    step = trace.step(zeros)
    empty = step.by_name[zeros]
    rules = ["b/x n6 -> b/x n3", "b n6 -> b n3/x", "b n6/x -> b n3/x", "b n6/x -> b n3"]
    assert [empty.text_of(rule) for rule in empty.axis_rules] == [*rules, "b n6 -> b n3"]
    moves = MovePrices(Mesh(x=2), step.dtype, load_profile("h100"))
    edge = StepProblem(step, moves, 1, False).edges[-1]  # behind all that move
    nodes = StepProblem(step, moves, 1, False).nodes
    made = nodes[edge.source].placements[:, -1, 0]
    used = nodes[edge.user].placements[:, 0, 0]
    for option, user_option in product(range(len(made)), range(len(used))):
        pair = edge.rows[option], edge.columns[user_option]
        is_same = made[option] == used[user_option]
        is_tag = made[option] in (SUM, REPLICAS) and used[user_option] == REPLICAS
        assert edge.banned[pair] == (not (is_same or is_tag))
        assert edge.banned[pair] or not edge.costs(*pair).any()
    # Where its values are read, too, tags are those of the operation that reads them.
    trace.add("out", LetteredOp(["ae", "ad", "ade"], "linear"), (zeros, y), (8, 6, 3))
    out = fuse_operations(trace.step("out")).by_name["out"]
    assert out.operands == ("y",) and not out.length_operands
    assert "b n6 | copy(x) -> b n6 n3/x" in [out.text_of(rule) for rule in out.axis_rules]
