"""The case table: redistributions with one result on all runtimes, forward and backward.

It has every row of the documents' tables, on meshes of one, two and three axes with at most eight devices.
`tests/runtimes/test_case_table.py` runs it on every runtime; other tests borrow rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import xshard as xs

Name = TypeVar("Name")


@dataclass(frozen=True)
class Case:
    """An expression for an array of global `shape` on a mesh."""

    name: str
    expression: str
    mesh_text: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @cached_property
    def mesh(self) -> xs.Mesh:
        return xs.Mesh.parse(self.mesh_text)

    @property
    def has_single_axis(self) -> bool:
        """True if the mesh has one axis, so that `jax.pmap` can run the case."""
        return len(self.mesh.axes) == 1

    def plan(self, **options: object) -> xs.Plan:
        return xs.plan(self.expression, self.mesh, self.shape, self.dtype, **options)


# Owners that are data: with an empty part, with rows in another order; rows that nobody reads and all read.
CELLS = xs.Owners([3, 0, 0, 3, 1, 3, 0, 3, 1], parts=4)
NEAR = xs.Needs.of_rows([[8, 4], [], [0, 1, 4, 8], [1, 8]])
TURNED = xs.Owners.of_rows([[5, 3], [0, 8, 1], [7], [6, 2, 4]])
ONE_WAY = xs.Needs.of_rows([[], [], [3], []])
ALL = xs.Needs.of_rows([[5, 7, 6, 4], [0, 1, 2, 3]])

CASES = (
    # One axis: gathers, slices and the two kinds of copies.
    Case("gather", "n/a d -> n d", "a=4", (8, 3)),
    Case("gather-inner-dim", "n d/a -> n d", "a=4", (3, 8)),
    Case("gather-to-copies", "n/a d -> n d | copy(a)", "a=4", (8, 3)),
    Case("gather-8", "n/a d -> n d | copy(a)", "a=8", (16, 2)),
    Case("gather-two-devices", "n/a -> n", "a=2", (6,)),
    Case("slice", "n d -> n/a d", "a=4", (8, 3)),
    Case("slice-copies", "n d | copy(a) -> n/a d", "a=4", (8, 3)),
    Case("declare-copies", "n d -> n d | copy(a)", "a=4", (4, 3)),
    Case("undeclare-copies", "n d | copy(a) -> n d", "a=4", (4, 3)),
    Case("nothing-to-do", "n/a d -> n/block(a) d", "a=4", (8, 3)),
    # One axis: sums that end, begin and stay.
    Case("all-reduce", "n d | sum(a) -> n d", "a=4", (4, 3)),
    Case("all-reduce-to-copies", "n d | sum(a) -> n d | copy(a)", "a=4", (4, 3)),
    Case("reduce-scatter", "n d | sum(a) -> n/a d", "a=4", (8, 3)),
    Case("reduce-scatter-inner-dim", "n d | sum(a) -> n d/a", "a=4", (3, 8)),
    Case("reduce-scatter-8", "n d | sum(a) -> n/a d", "a=8", (16, 2)),
    Case("sum-from-cut", "n/a d -> n d | sum(a)", "a=4", (8, 3)),
    Case("sum-from-replicas", "n d -> n d | sum(a)", "a=4", (4, 3)),
    Case("sum-from-copies", "n d | copy(a) -> n d | sum(a)", "a=4", (4, 3)),
    Case("sum-kept", "n d | sum(a) -> n d | sum(a)", "a=4", (4, 3)),
    # One axis: means, maxima, minima.
    Case("mean", "n d | mean(a) -> n d", "a=4", (4, 3)),
    Case("mean-to-copies", "n d | mean(a) -> n d | copy(a)", "a=4", (4, 3)),
    Case("mean-scatter", "n d | mean(a) -> n/a d", "a=4", (8, 3)),
    Case("mean-from-cut", "n/a d -> n d | mean(a)", "a=4", (8, 3)),
    Case("mean-from-replicas", "n d -> n d | mean(a)", "a=4", (4, 3)),
    Case("mean-becomes-sum", "n d | mean(a) -> n d | sum(a)", "a=4", (4, 3)),
    Case("mean-of-three", "n d | mean(a) -> n d", "a=3", (4, 3)),
    Case("max", "n d | max(a) -> n d", "a=4", (4, 3)),
    Case("max-to-copies", "n d | max(a) -> n d | copy(a)", "a=4", (4, 3)),
    Case("max-scatter", "n d | max(a) -> n/a d", "a=4", (8, 3)),
    Case("min", "n d | min(a) -> n d", "a=2", (4, 3)),
    Case("min-scatter", "n d | min(a) -> n d/a", "a=4", (3, 8)),
    Case("max-uneven", "n d | max(a) -> n/a d", "a=4", (6, 3)),
    # One axis: a cut moves to another dim, or to another order.
    Case("all-to-all", "b s/a c -> b s c/a", "a=4", (2, 8, 4)),
    Case("all-to-all-back", "b s c/a -> b s/a c", "a=4", (2, 8, 4)),
    Case("all-to-all-8", "b s/a h d -> b s h/a d", "a=8", (1, 16, 8, 2)),
    Case("zigzag-all-to-all", "b s/zigzag(a) c -> b s c/a", "a=4", (2, 16, 4)),
    Case("zigzag-all-to-all-back", "b s c/a -> b s/zigzag(a) c", "a=4", (2, 16, 4)),
    Case("zigzag-gather", "s/zigzag(a) c -> s c | copy(a)", "a=4", (16, 2)),
    Case("zigzag-slice", "s c -> s/zigzag(a) c", "a=4", (16, 2)),
    Case("zigzag-reduce-scatter", "s c | sum(a) -> s/zigzag(a) c", "a=4", (16, 2)),
    Case("zigzag-from-block", "s/a c -> s/zigzag(a) c", "a=4", (16, 2)),
    Case("zigzag-uneven", "s/zigzag(a) c -> s/a c", "a=4", (11, 2)),
    Case("cyclic-from-block", "s/a c -> s/cyclic(a) c", "a=4", (8, 2)),
    Case("cyclic-gather", "s/cyclic(a) c -> s c", "a=4", (8, 2)),
    Case("cyclic-uneven", "s/cyclic(a) c -> s/zigzag(a) c", "a=4", (10, 2)),
    Case("balanced-from-block", "s/a c -> s/balanced(a) c", "a=4", (9, 2)),
    Case("balanced-gather", "s/balanced(a) c -> s c | copy(a)", "a=4", (6, 2)),
    # One axis: uneven and empty blocks, empty arrays, axes of size 1, scalars, anonymous dims.
    Case("uneven-gather", "n/a d -> n d", "a=4", (7, 3)),
    Case("uneven-slice", "n d | copy(a) -> n/a d", "a=4", (7, 3)),
    Case("uneven-reduce-scatter", "n d | sum(a) -> n/a d", "a=4", (7, 3)),
    Case("uneven-all-to-all", "n/a d -> n d/a", "a=4", (7, 6)),
    Case("uneven-sum-from-cut", "n/a d -> n d | sum(a)", "a=4", (7, 3)),
    Case("empty-block-gather", "n/a d -> n d | copy(a)", "a=4", (5, 3)),
    Case("empty-block-all-to-all", "n/a d -> n d/a", "a=4", (5, 9)),
    Case("one-row", "n/a d -> n d/a", "a=4", (1, 4)),
    Case("no-rows", "n/a d -> n d/a", "a=4", (0, 4)),
    Case("no-columns", "n d | sum(a) -> n/a d", "a=2", (4, 0)),
    Case("lone-device", "n/a d -> n d | copy(a)", "a=1", (3, 2)),
    Case("lone-device-sum", "n d | mean(a) -> n/a d", "a=1", (3, 2)),
    Case("scalar-all-reduce", "() | sum(a) -> ()", "a=4", ()),
    Case("scalar-mean", "() | mean(a) -> () | copy(a)", "a=4", ()),
    Case("scalar-copies", "() -> () | copy(a)", "a=4", ()),
    Case("scalar-max", "() | max(a) -> ()", "a=4", ()),
    Case("anonymous-gather", "... c/a -> ... c", "a=4", (2, 3, 8)),
    Case("anonymous-none", "n/a ... -> n ... | copy(a)", "a=4", (8,)),
    Case("anonymous-middle", "b/a ... c -> b ... c/a", "a=4", (4, 2, 3, 8)),
    Case("float64", "n/a d -> n d/a", "a=4", (8, 4), "float64"),
    Case("bfloat16", "n/a d -> n d | copy(a)", "a=4", (8, 4), "bfloat16"),
    # Two axes: nested and grouped cuts, and their orders.
    Case("gather-nested", "n/a/b d -> n d", "a=2,b=4", (16, 3)),
    Case("gather-inner-axis", "n/a/b d -> n/a d | copy(b)", "a=2,b=2", (8, 3)),
    Case("gather-outer-axis", "n/a/b d -> n/b d", "a=2,b=2", (8, 3)),
    Case("slice-nested", "n d -> n/b/a d", "a=2,b=4", (16, 3)),
    Case("reorder-axes", "n/a/b d -> n/b/a d", "a=2,b=2", (8, 3)),
    Case("reorder-axes-2x4", "n/a/b d -> n/b/a d", "a=2,b=4", (16, 3)),
    Case("reorder-group", "n/(a,b) d -> n/(b,a) d", "a=2,b=4", (8, 3)),
    Case("swap-dims", "n/a d/b -> n/b d/a", "a=2,b=2", (4, 6)),
    Case("swap-dims-2x4", "n/a d/b -> n/b d/a", "a=2,b=4", (8, 8)),
    Case("move-to-other-axis", "n/a d -> n/b d", "a=2,b=2", (8, 3)),
    Case("move-to-larger-axis", "n/a d -> n/b d", "a=2,b=4", (8, 3)),
    Case("move-to-smaller-axis", "n/b d -> n/a d", "a=2,b=4", (8, 3)),
    Case("move-to-copies-of-parts", "n/b d -> n/a d | copy(b)", "a=2,b=4", (8, 3)),
    Case("half-an-axis-to-each-dim", "n d/a -> n/a d/b", "a=2,b=4", (8, 8)),
    Case("move-both", "n/a/b d -> n d/a/b", "a=2,b=2", (4, 8)),
    Case("move-group", "n/(a,b) d -> n d/(b,a)", "a=2,b=4", (8, 8)),
    Case("group-becomes-nested", "n/(a,b) d -> n/a/b d", "a=2,b=2", (5, 3)),
    Case("spread-over-dims", "n/a/b d -> n/a d/b", "a=2,b=2", (8, 4)),
    Case("segments-gathered", "n/block(a,8,4,4) d -> n d", "a=4", (16, 3)),
    Case("segments-to-contiguous", "n/block(a,5,2,6) d -> n/a d", "a=4", (13, 3)),
    Case("segments-of-sum", "n d | sum(a) -> n/block(a,8,4) d", "a=4", (12, 2)),
    Case("documents-to-other-axis", "n/zigzag(a,8,8) d -> n/zigzag(b,8,8) d", "a=2,b=4", (16, 2)),
    Case("segments-to-other-axis", "n/block(a,8,8) d -> n/block(b,8,8) d", "a=2,b=4", (16, 2)),
    Case("zigzag-group", "n/zigzag(a,b) d -> n d/a/b", "a=2,b=2", (16, 4)),
    Case("zigzag-inside-cut", "n/a/zigzag(b) d -> n/a d/b", "a=2,b=2", (16, 4)),
    Case("cut-inside-zigzag", "n/zigzag(a)/b d -> n/b d", "a=2,b=2", (16, 3)),
    Case("cyclic-group", "n/cyclic(a,b) d -> n/a d/b", "a=2,b=2", (9, 5)),
    Case("balanced-nested", "n/balanced(a)/balanced(b) d -> n/b d/a", "a=2,b=2", (7, 3)),
    Case("uneven-reorder", "n/a/b d -> n/b/a d", "a=2,b=2", (7, 3)),
    Case("uneven-nested-empty", "n/a/b d -> n d/b | copy(a)", "a=2,b=4", (5, 6)),
    # Two axes: several tags at once.
    Case("sum-over-both", "n d | sum(a,b) -> n d", "a=2,b=2", (4, 3)),
    Case("sum-over-one-of-two", "n d | sum(a,b) -> n d | sum(b) copy(a)", "a=2,b=4", (4, 3)),
    Case("sum-kept-cut-moves", "n/b d | sum(a) -> n d/b | sum(a)", "a=2,b=2", (4, 6)),
    Case("sum-changes-axis", "n d | sum(a) -> n d | sum(b)", "a=2,b=2", (4, 3)),
    Case("sum-scattered-twice", "n d | sum(a,b) -> n/a d/b", "a=2,b=4", (4, 8)),
    Case("sum-scattered-nested", "n d | sum(a,b) -> n/a/b d", "a=2,b=4", (8, 3)),
    Case("sum-of-cuts", "n/a d | sum(b) -> n/b d | copy(a)", "a=2,b=4", (8, 3)),
    Case("sum-and-copy", "n d | sum(a) copy(b) -> n/a d/b", "a=2,b=2", (4, 6)),
    Case("sum-into-copies-of-both", "n/a d | sum(b) -> n d | copy(a,b)", "a=2,b=4", (4, 3)),
    Case("sums-begin-over-both", "n/a d -> n d | sum(a,b)", "a=2,b=2", (4, 3)),
    Case("cut-becomes-sum-sum-becomes-cut", "n/a d | sum(b) -> n/b d | sum(a)", "a=2,b=2", (4, 3)),
    Case("mean-over-both", "n d | mean(a,b) -> n/a d", "a=2,b=4", (4, 3)),
    Case("mean-beside-sum", "n d | sum(a) mean(b) -> n d | copy(a,b)", "a=2,b=4", (4, 3)),
    Case("mean-kept-cut-moves", "n/b d | mean(a) -> n d/b | mean(a)", "a=2,b=2", (4, 6)),
    Case("max-of-cuts", "n/a d | max(b) -> n d/a | copy(b)", "a=2,b=2", (4, 6)),
    Case("min-over-both", "n d | min(a,b) -> n/b d", "a=2,b=2", (4, 3)),
    Case("copy-kept-cut-moves", "n/a d | copy(b) -> n d/a | copy(b)", "a=2,b=2", (4, 6)),
    Case("scalar-over-both", "() | sum(a) mean(b) -> () | copy(b)", "a=2,b=4", ()),
    Case("size-1-axes", "n/a/b d/c -> n/b d | copy(c)", "a=1,b=4,c=1", (8, 3)),
    Case("size-1-sum", "n/b d | sum(a) -> n d/b/a", "a=1,b=4", (8, 4)),
    # What models do with three axes.
    Case("ulysses", "b/dp s/cp h d -> b/dp s h/cp d", "dp=2,cp=4", (2, 8, 4, 2)),
    Case("ulysses-zigzag", "b/dp s/zigzag(cp) h d -> b/dp s h/cp d", "dp=2,cp=4", (2, 16, 4, 2)),
    Case("fsdp-weight", "n/dp d/tp -> n d/tp | copy(dp)", "dp=4,tp=2", (8, 6)),
    Case("sequence-parallel-in", "b/dp s/tp h -> b/dp s h | copy(tp)", "dp=2,tp=4", (2, 8, 3)),
    Case("sequence-parallel-out", "b/dp s h | sum(tp) -> b/dp s/tp h", "dp=2,tp=4", (2, 8, 3)),
    Case("rotate-three", "x/a y/b z/c -> x/c y/a z/b", "a=2,b=2,c=2", (4, 6, 2)),
    Case("three-axes-one-dim", "x/a/b/c y -> x/c y/a/b", "a=2,b=2,c=2", (8, 4)),
    Case("three-axes-tags", "x/a y | sum(b) copy(c) -> x/b y/c | copy(a)", "a=2,b=2,c=2", (4, 6)),
    Case("three-axes-sum", "x y | sum(a,b,c) -> x/b y/(c,a)", "a=2,b=2,c=2", (4, 8)),
    Case("three-axes-uneven", "x/(a,b) y/c -> x/c y/b/a", "a=2,b=2,c=2", (7, 5)),
    Case("gather-one-of-three", "x/a/b y/c -> x/a y/c | copy(b)", "a=2,b=2,c=2", (8, 4)),
    # Dims in another order: a view of what the other steps give.
    Case("permuted", "n/a d -> d n/a", "a=4", (8, 3)),
    Case("permuted-gather", "s/a h k -> h s k", "a=4", (8, 2, 3)),
    Case("permuted-ulysses", "b/dp s/cp h d -> b/dp h/cp s d", "dp=2,cp=4", (2, 8, 4, 2)),
    Case("permuted-mean-uneven", "n/a d | mean(b) -> d/b n | copy(a)", "a=2,b=2", (5, 4)),
    Case("permuted-max", "n d | max(a) -> d/a n", "a=4", (3, 8)),
    Case("permuted-halo", "h/a w/b -> w h/a:halo(1,1)", "a=2,b=2", (8, 4)),
    # Overlaps: every boundary, one dim and several, alone and with collectives.
    Case("halo", "b h/a w -> b h/a:halo(1,1) w", "a=4", (2, 8, 3)),
    Case("halo-periodic", "h/a w -> h/a:halo(2,1,periodic) w", "a=4", (12, 3)),
    Case("halo-periodic-two-devices", "h/a -> h/a:halo(1,1,periodic)", "a=2", (8,)),
    Case("halo-reflect", "h/a -> h/a:halo(2,2,reflect)", "a=4", (12,)),
    Case("halo-edge-none", "h/a -> h/a:halo(2,2,edge,none)", "a=4", (12,)),
    Case("halo-constant", "h/a w -> h/a:halo(1,2,constant(7)) w", "a=4", (8, 3)),
    Case("halo-constant-bfloat16", "h/a -> h/a:halo(1,2,constant(-2))", "a=4", (8,), "bfloat16"),
    Case(
        "halo-constant-beside-uneven",
        "h/a w -> h/a:halo(1,0) w:halo(1,2,constant(3))",
        "a=4",
        (7, 2),
    ),
    Case("halo-constant-int", "h/a -> h/a:halo(1,2,constant(-2))", "a=4", (8,), "int32"),
    Case("halo-many-hops", "h/a -> h/a:halo(3,3,periodic)", "a=8", (16,)),
    Case("halo-uneven", "h/balanced(a) w -> h/balanced(a):halo(1,1) w", "a=4", (10, 2)),
    Case(
        "halo-empty",
        "h/sizes(a,3,0,3,2) -> h/sizes(a,3,0,3,2):halo([1,0,1,1],[1,0,1,1])",
        "a=4",
        (8,),
    ),
    Case("halo-zigzag", "s/zigzag(a) -> s/zigzag(a):halo(3,0)", "a=4", (32,)),
    Case("halo-corners", "h/a w/b -> h/a:halo(1,1) w/b:halo(2,1,periodic)", "a=2,b=4", (8, 16)),
    Case(
        "halo-pole", "h/a w/b -> h/a:halo(2,2,pole(-1)) w/b:halo(1,1,periodic)", "a=2,b=4", (8, 16)
    ),
    Case("halo-of-sum", "h/a w | sum(b) -> h/a:halo(1,1) w", "a=2,b=2", (8, 4)),
    Case("halo-of-mean", "h/a | mean(b) -> h/a:halo(1,1,constant(8)) | copy(b)", "a=2,b=2", (8,)),
    Case("halo-of-max", "h/a | max(b) -> h/a:halo(1,1,periodic)", "a=2,b=2", (8,)),
    Case("halo-stays", "h/a:halo(1,1,periodic) c/b -> h/a:halo(1,1,periodic) c", "a=2,b=2", (8, 4)),
    Case("halo-widened", "h/a:halo(1,1) w -> h/a:halo(2,2) w", "a=4", (12, 2)),
    Case("halo-transposed", "h/a:halo(1,1,reflect) c -> h c/a", "a=4", (12, 8)),
    Case("trim", "h/a:halo(1,2,edge) w -> h/a w", "a=4", (12, 2)),
    Case("window", "h/a w -> h/a:window(k=3,s=2,p=1) w", "a=4", (16, 2)),
    Case(
        "window-negative",
        "h/a w/b -> h/a:window(k=5,s=4,p=2) w/b:window(k=5,s=4,p=2)",
        "a=2,b=2",
        (6, 10),
    ),
    Case("window-aligned", "h/a -> h/a:window(k=3,p=0,out=aligned)", "a=4", (13,)),
    Case("fold", "h/a:fold(halo(1,1)) w -> h/a w", "a=4", (8, 3)),
    Case("fold-to-all", "h/a:fold(halo(2,2,reflect)) w -> h w", "a=4", (12, 3)),
    Case("fold-to-copies", "h/a:fold(halo(1,1,periodic)) -> h | copy(a)", "a=4", (8,)),
    Case("fold-begun", "h/a w -> h/a:fold(halo(1,1)) w", "a=4", (8, 3)),
    Case("fold-stays", "h/a:fold(halo(1,1)) c/b -> h/a:fold(halo(1,1)) c", "a=2,b=2", (8, 4)),
    Case(
        "fold-corners", "h/a:fold(halo(1,1)) w/b:fold(halo(1,1,edge)) -> h w/a", "a=2,b=2", (8, 8)
    ),
    # Owner maps, and the rows that parts read.
    Case("by-gathered", f"n/by(a,{CELLS}) d -> n d | copy(a)", "a=4", (9, 2)),
    Case("by-from-block", f"n/a d -> n/by(a,{CELLS}) d", "a=4", (9, 2)),
    Case("by-migrates", f"n/by(a,{CELLS}) d -> n/by(a,{TURNED}) d", "a=4", (9, 2)),
    Case("by-of-sum", f"n d | sum(a) -> n/by(a,{CELLS}) d", "a=4", (9, 2)),
    Case("by-two-axes", f"n/by(b,a,{CELLS}) d -> n d/a", "a=2,b=2", (9, 4)),
    Case("reads", f"n/by(a,{CELLS}) d -> n/by(a,{CELLS}):reads({NEAR}) d", "a=4", (9, 2)),
    Case("reads-all-of-block", f"n/a d/b -> n/a:reads({ALL}) d/b", "a=2,b=2", (8, 4)),
    Case("reads-of-sum", f"n d | sum(b) -> n/a:reads({ALL}) d", "a=2,b=2", (8, 3)),
    Case("reads-and-halo", f"n/a d/b -> n/a:reads({ALL}) d/b:halo(1,1)", "a=2,b=2", (8, 4)),
    Case(
        "reads-folded", f"n/by(a,{CELLS}):fold(reads({NEAR})) d -> n/by(a,{CELLS}) d", "a=4", (9, 2)
    ),
    Case("reads-one-way", f"n/a d -> n/a:reads({ONE_WAY}) d", "a=4", (8, 2)),
    Case("reads-migrate", f"n/by(a,{CELLS}):reads({NEAR}) -> n/by(a,{TURNED})", "a=4", (9,)),
)


def one_of_each(plans: Mapping[Name, xs.Plan], meshes: bool = True) -> list[Name]:
    """The fewest first names with plans, forward and backward, of every kind of step.

    meshes: on every mesh; else on any.
    """
    seen: set[tuple[str, str]] = set()
    chosen = []
    for name, plan in plans.items():
        steps = (*plan.steps, *(plan.backward.steps if plan.src.is_linear else ()))
        if new := {(step.kind, str(plan.mesh) if meshes else "") for step in steps} - seen:
            chosen.append(name)
            seen |= new
    return chosen
