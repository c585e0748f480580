"""The verbs of both bridges have the same options: same names, types, defaults and order.

Positional arguments are values, then layouts, then the mesh; options are keywords.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import pytest
import torch

import jax_bridge as xj
import torch_bridge as xt
import xshard as xs
from jax_bridge import torch_interop
from jax_bridge.arrays.shard_map import ShardMapKeywords
from jax_bridge.state.files import JaxLoadKeywords
from jax_bridge.torch_interop import to_jax, to_torch
from jax_bridge.torch_interop.hand_over import HandOverKeywords, ToJaxKeywords
from torch_bridge.contractions.einsum import EinsumKeywords
from torch_bridge.models.parallelize import ParallelizeKeywords
from torch_bridge.redistribution.options import MoveKeywords, TwoMeshKeywords, TwoMeshOptions
from torch_bridge.state.files import TorchLoadKeywords
from torch_bridge.state.transfer import TorchTransferKeywords
from xshard.contractions.attention import AttentionKeywords
from xshard.state.transfer import TransferKeywords
from xshard.step.suggest import SuggestKeywords

OPS = "all_gather all_reduce all_to_all copy_to halo_exchange reduce_scatter shard trim_halo"
TWINS = {
    name: (getattr(xt, name), getattr(xj, name))
    for name in ("redistribute", "einsum", "positions", "route", "transfer", "save", "load")
}
TWINS |= {f"ops.{name}": (getattr(xt.ops, name), getattr(xj.ops, name)) for name in OPS.split()}
TWINS |= {
    f"nn.{name}": (getattr(xt.nn, name), getattr(xj.nn, name))
    for name in ("attention", "cross_entropy")
}
VERBS = {
    f"{bridge}.{name}": pair[i]
    for name, pair in TWINS.items()
    for i, bridge in enumerate(("xt", "xj"))
}
VERBS |= {
    f"xj.{name}": getattr(xj, name) for name in ("reshard", "shard_map", "place", "stored_as")
}
VERBS |= {"xj.ops.valid_mask": xj.ops.valid_mask, "xt.parallelize": xt.parallelize}
VERBS |= {"xt.nn.domain_parallel": xt.nn.domain_parallel}
VERBS |= {f"torch_interop.{name}": getattr(torch_interop, name) for name in ("to_jax", "to_torch")}

VALUES = {*"xqkvf", "tree", "array", "arrays", "model", "operands", "path", "logits", "labels"}
VALUES |= {"to", "dim", "split_dim", "concat_dim", "width"}
LAYOUTS = {"layout", "layouts", "rules", "expression", "parameters", "inputs", "axis"}
MESHES = {"mesh", "dst_mesh"}
SHARED = ("profile", "progress", "bucket_bytes", "names", "check_replicated")

# Options of one bridge, by the reason.
ONLY = {
    "processes are separate programs, which compare their calls": {"debug"},
    "XLA schedules, fuses and places": {
        "async_op",
        "comm_dtype",
        "device",
        "memory_limit",
        "bucket_bytes",
    },
    "a program of JAX has static shapes, and counts nothing": {"sizes"},
    "a route goes along axes that are manual around it": {"mesh"},
    "a process of torch may be in one of two meshes": {"src_mesh", "two_meshes"},
    "a jax.Array has a global shape": {"shapes"},
    "torch converts as it moves": {"dtype"},
    "autograd keeps what the backward pass needs": {"save"},
    "modes of JAX's differentiation": {"ad"},
    "options of jax.numpy.einsum and jax.nn": {
        "preferred_element_type",
        "precision",
        "implementation",
    },
}
DIFFERENT = {
    "mesh": "inside shard_map JAX knows the mesh",
    "dtype": "a dtype is the framework's own",
    "rules": "the rules of xj.load stand before a mesh without a default",
}


# The keywords that overloads and callers of each verb share, as type checkers read them.
KEYWORDS = {
    "xs.suggest": (xs.suggest, SuggestKeywords),
    "xt.attention": (xt.nn.attention, AttentionKeywords),
    "xt.einsum": (xt.einsum, EinsumKeywords),
    "xt.load": (xt.load, TorchLoadKeywords),
    "xt.parallelize": (xt.parallelize, ParallelizeKeywords),
    "xt.redistribute": (xt.redistribute, MoveKeywords),
    "xt.transfer": (xt.transfer, TorchTransferKeywords),
    "xj.load": (xj.load, JaxLoadKeywords),
    "xj.shard_map": (xj.shard_map, ShardMapKeywords),
    "xj.transfer": (xj.transfer, TransferKeywords),
    "to_jax": (to_jax, ToJaxKeywords),
    "to_torch": (to_torch, HandOverKeywords),
}
# Keywords on which the type of a result depends: overloads name them.
OVERLOADED = {"async_op", "dry_run", "dtensor", "like", "return_lse", "writable"}


def plain(annotation: str) -> str:
    """An annotation without the names that frameworks have for arrays, layouts and meshes."""
    annotation = annotation.replace("JaxLayoutsLike", "LayoutsLike")
    text = re.sub(
        r"\b(torch\.)?Tensor\b|\bjax\.(Array|typing\.ArrayLike)\b|^(Any|T)$", "Array", annotation
    )
    return re.sub(r"\b(MeshLike|AnyMesh|(jax\.sharding\.)?(Jax)?Mesh)(?= |$)", "AnyMesh", text)


@pytest.mark.parametrize("name", TWINS)
def test_an_option_is_the_same_in_both_bridges(name: str) -> None:
    ours, theirs = (dict(inspect.signature(f).parameters) for f in TWINS[name])
    common = [option for option in ours if option in theirs]
    assert common == [option for option in theirs if option in ours], "another order"
    for option in set(common) - DIFFERENT.keys():
        a = ours[option]
        b = theirs[option]
        assert (a.kind, plain(a.annotation), a.default) == (
            b.kind,
            plain(b.annotation),
            b.default,
        ), option
    for option in ours.keys() ^ theirs.keys():
        assert any(option in options for options in ONLY.values()), (
            f"{option} is in one bridge only"
        )


@pytest.mark.parametrize("name", VERBS)
def test_values_come_first_then_layouts_then_the_mesh(name: str) -> None:
    ranks = [
        next(rank for rank, names in enumerate((VALUES, LAYOUTS, MESHES)) if p.name in names)
        for p in inspect.signature(VERBS[name]).parameters.values()
        if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    ]
    # The expression of an einsum stands before its operands.
    assert ranks == sorted(ranks) or (ranks == [1, 0] and name.endswith("einsum"))


def test_an_option_has_one_type_in_all_verbs() -> None:
    types = defaultdict[str, set[str]](set)
    for f in VERBS.values():
        for p in inspect.signature(f).parameters.values():
            if p.name in SHARED:
                types[p.name].add(p.annotation.replace("Profiles", "ProfileLike"))
    assert {name: len(annotations) for name, annotations in types.items()} == dict.fromkeys(
        SHARED, 1
    ), types


def test_an_option_says_its_type_unless_it_may_be_any_value() -> None:
    """Trees, batches and functions of users are Any; the types of overloads are in the overloads."""
    anything = VALUES | {
        "layouts",
        "expression",
        "shape",
        "like",
        "batch",
        "args",
        "state",
        "options",
    }
    for package in (xs, xt, xj):
        functions = {name: getattr(package, name) for name in package.__all__}
        for name, function in filter(lambda item: inspect.isfunction(item[1]), functions.items()):
            options = inspect.signature(function).parameters.values()
            bare = {each.name for each in options if str(each.annotation) == "Any"}
            assert bare <= anything, f"{package.__name__}.{name}"


def test_options_of_two_meshes_are_the_same_as_keywords_and_as_a_value() -> None:
    assert TwoMeshKeywords.__annotations__.keys() == set(TwoMeshOptions._fields)
    named = inspect.signature(xt.redistribute).parameters.keys() - {"two_meshes"}
    values = {"x", "layouts", "mesh", "async_op"}
    assert named - values == MoveKeywords.__annotations__.keys() - set(TwoMeshOptions._fields)


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_that_overloads_share_are_those_of_the_function(name: str) -> None:
    function, keywords = KEYWORDS[name]
    shared = {word: given.__forward_arg__ for word, given in keywords.__annotations__.items()}
    if keywords is MoveKeywords:
        shared = {word: shared[word] for word in shared.keys() - set(TwoMeshOptions._fields)}
    named = OVERLOADED | ({"names"} if name == "xj.transfer" else set())
    options = {
        parameter.name: parameter.annotation
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in named
    }
    assert shared == options


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("comm_dtyp", "comm_dtype"), ("dest_mesh", "dst_mesh"), ("async", "async_op")],
)
def test_an_option_that_redistribute_lacks_is_an_error_with_the_nearest(
    wrong: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"no option '{wrong}': did you mean '{meant}'"):
        xt.redistribute(torch.ones(2), "n -> n", xs.Mesh(a=1), **{wrong: None})
