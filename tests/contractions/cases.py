"""Contractions that every runtime has to get right: values, all gradients, bytes.

Each is its name, the mesh of 4 or 8 devices, the length of every dim, and the expression.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import xshard as xs
from xshard.contractions.expression import contraction
from xshard.notation.parser import names_of_dim

Case = tuple[str, Mapping[str, int], Mapping[str, int], str]

LENGTHS = {
    "b": 8,
    "s": 8,
    "d": 8,
    "f": 16,
    "v": 8,
    "h": 8,
    "k": 2,
    "t": 8,
    "e": 8,
    "c": 8,
    "r": 3,
    "n": 16,
}
TP4 = {"tp": 4}
TP8 = {"tp": 8}
BOTH = {"dp": 2, "tp": 4}
SQUARE = {"x": 2, "y": 2}
CUBE = {"x": 2, "y": 2, "z": 2}


def spelled(layout: xs.Layout) -> tuple[str, ...]:
    """The names of an array with a dim for each, as einsum takes them: those of composed dims apart."""
    return tuple(chain.from_iterable(map(names_of_dim, layout.dims)))


def _case(name: str, mesh: Mapping[str, int], expression: str, **lengths: int) -> Case:
    names = dict.fromkeys(
        name for layout in contraction(expression).operands for name in layout.names
    )
    return name, mesh, {name: lengths.get(name, LENGTHS[name]) for name in names}, expression


CASES: tuple[Case, ...] = (
    # Layers of models.
    _case("megatron_column", TP4, "b s d, d f/tp -> b s f/tp"),
    _case("megatron_row", TP4, "b s f/tp, f/tp d -> b s d"),
    _case("sp_column", TP8, "b s/tp d, d f/tp -> b s f/tp"),
    _case("sp_row", TP8, "b s f/tp, f/tp d -> b s/tp d"),
    _case("dp", TP4, "b/tp s d, d f -> b/tp s f"),
    _case("fsdp_rows", TP4, "b/tp s d, d/tp f -> b/tp s f"),
    _case("fsdp_columns", TP4, "b/tp s d, d f/tp -> b/tp s f"),
    _case("dp_tp_column", BOTH, "b/dp s d, d f/tp -> b/dp s f/tp"),
    _case("dp_tp_row", BOTH, "b/dp s f/tp, f/tp d -> b/dp s d"),
    _case("fsdp_tp_column", BOTH, "b/dp s d, d/dp f/tp -> b/dp s f/tp"),
    _case("fsdp_tp_row", BOTH, "b/dp s f/tp, f/tp d/dp -> b/dp s d"),
    _case("fsdp_tp_sp_column", BOTH, "b/dp s/tp d, d/dp f/tp -> b/dp s f/tp"),
    _case("fsdp_tp_sp_row", BOTH, "b/dp s f/tp, f/tp d/dp -> b/dp s/tp d"),
    _case("hsdp", CUBE, "b/(x,y) s d, d/y f/z -> b/(x,y) s f/z"),
    _case("three_axes", CUBE, "b/x s/y d/z, d/y f/z -> b/x s/y f/z"),
    _case("three_axes_llama", CUBE, "b/(x,y) s/z d, d/(x,y) f/z -> b/(x,y) s f/z"),
    _case("logits_vocab", TP4, "b s d, v/tp d -> b s v/tp"),
    _case("logits_gather", TP4, "b s d, v/tp d -> b/tp s v"),
    _case("heads_qk", TP4, "b s h/tp k, b t h/tp k -> b h/tp s t"),
    _case("heads_av", TP4, "b h/tp s t, b t h/tp k -> b s h/tp k"),
    _case("qk_sequence_cut", TP4, "b s/tp h k, b t/tp h k -> b h s/tp t"),
    _case("qk_ulysses", TP8, "b s/tp h k, b t/tp h k -> b h/tp s t"),
    _case("av_sequence_cut", TP4, "b h s/tp t, b t/tp h k -> b s/tp h k"),
    _case("experts", TP4, "e/tp c d, e/tp d f -> e/tp c f"),
    _case("experts_from_tokens", TP8, "e c/tp d, e/tp d f -> e/tp c f"),
    _case("experts_back", TP4, "e/tp c f, e/tp f d -> e c/tp d"),
    _case("experts_tokens_both", BOTH, "e c/(dp,tp) d, e/tp d/dp f -> e c/(dp,tp) f"),
    _case("lora_down", BOTH, "b/dp s d/tp, d/tp r -> b/dp s r"),
    _case("lora_up", BOTH, "b/dp s r, r f/tp -> b/dp s f/tp"),
    _case("weight_gradient_fsdp_tp", BOTH, "b/dp s d, b/dp s f/tp -> d/dp f/tp"),
    # Matrices.
    _case("two_d_weights", SQUARE, "b/x s d/y, d/x f/y -> b/x s f/y"),
    _case("two_d_stationary_out", SQUARE, "s/x d/y, d/x f/y -> s/x f/y"),
    _case("two_d_to_rows", SQUARE, "s/x d/y, d/x f/y -> s/(x,y) f"),
    _case("two_d_to_columns", SQUARE, "s/x d/y, d/x f/y -> s f/(y,x)"),
    _case("two_and_half_d", CUBE, "s/x d/y, d/x f/y -> s/x f/y"),
    _case("rows_to_columns", TP4, "s/tp d, d f -> s f/tp"),
    _case("columns_to_rows", TP4, "s d/tp, d f -> s/tp f"),
    _case("contracted_mismatch", TP4, "s d/tp, d f/tp -> s f"),
    _case("outer_cut_contracted", TP4, "s/tp d, d/tp f -> s f"),
    _case("weights_whole_out_cut", TP4, "b s d, d f -> b s f/tp"),
    _case("small_activation", TP8, "b/tp d, d/tp f -> b f/tp"),
    _case("gram", TP4, "s/tp d, s/tp f -> d f"),
    _case("gram_cut", TP4, "s/tp d, s/tp f -> d/tp f"),
    _case("outer", SQUARE, "s/x, f/y -> s/x f/y"),
    # Scalars, three operands, one operand.
    _case("dot", TP4, "s/tp, s/tp ->"),
    _case("trace_like", SQUARE, "s/x d/y, s/x d/y -> ()"),
    _case("three_operands", TP4, "b s/tp d, d r, r f/tp -> b s f/tp"),
    _case("three_operands_square", SQUARE, "b/x d/y, d/y r, r f/x -> b/x f/y"),
    _case("four_operands", TP4, "b/tp d, d r, r f/tp, f c -> b/tp c"),
    _case("sum_of_columns", SQUARE, "s/x d/y -> s/x"),
    _case("total", TP4, "s/tp d -> "),
    _case("permuted_and_summed", SQUARE, "b s/x d/y -> d/x s/y"),
    # Orders, uneven cuts, addends, copies, axes that no end names.
    _case("zigzag", TP4, "b s/zigzag(tp) d, d f/tp -> b s/zigzag(tp) f"),
    _case("zigzag_summed", TP4, "s/zigzag(tp) d, s/zigzag(tp) f -> d f"),
    _case("cyclic_to_block", TP4, "s/cyclic(tp) d, d f -> s/tp f"),
    _case("uneven", TP4, "s/tp d, d f/tp -> s f/tp", s=7, f=10),
    _case("uneven_summed", TP4, "s d/tp, d/tp f -> s/tp f", s=5, d=6),
    _case("empty_blocks", TP8, "s/tp d, d/tp f -> s f/tp", s=3, d=5),
    _case("one_row", SQUARE, "s/x f, f/y -> s f", s=1, f=1),
    _case("sizes", TP4, "n/sizes(tp,5,0,8,3) d, d f -> f n/tp"),
    _case("addends", TP4, "s d | sum(tp), d f/tp -> s f/tp"),
    _case("addends_cut", BOTH, "s d/dp | sum(tp), d/dp f -> s/tp f"),
    _case("averages", TP4, "n | mean(tp), n | copy(tp) -> n"),
    _case("copies", TP4, "b s d | copy(tp), d f | copy(tp) -> b s f"),
    _case("result_of_addends", TP4, "b d/tp, d/tp f -> b f | sum(tp)"),
    _case("result_of_copies", TP4, "b d/tp, d/tp f -> b f | copy(tp)"),
    _case("axis_left_alone", {"dp": 2, "tp": 2}, "s/tp d, d f -> s f/tp"),
    _case("gradients_share_the_cotangent", TP4, "b d/tp, f d -> b f/tp", b=8, d=8, f=4),
    _case("batched_rows", SQUARE, "b/x s d, b/x d -> s b/y"),
    # Composed dims, and names that an operand has twice.
    _case("heads_of_one_dim", TP4, "b s (h k)/tp, b t (h k)/tp -> b h/tp s t"),
    _case("heads_to_one_dim", BOTH, "b h/tp s t, b/dp t (h k)/tp -> b/dp s (h k)/tp"),
    _case("composed_zigzag", TP4, "(s h)/zigzag(tp) d, h s -> (d s) h/tp", s=16),
    _case("diagonals", SQUARE, "b/x s/y s, s -> b/x s/y"),
    _case("trace", TP4, "s s/tp ->"),
    _case("uneven_diagonal_of_three", TP4, "s d s/zigzag(tp) s -> d s/tp", s=7),
    _case("diagonal_of_a_composed_dim", TP4, "d (s d)/tp -> d s", s=4),
)
