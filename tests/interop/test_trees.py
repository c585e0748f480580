"""Whole trees: one rule per pattern of names, all of them checked before any is handed over."""

from __future__ import annotations

import contextlib
import io
import re
from collections import OrderedDict

import jax
import numpy as np
import pytest
import torch

import xshard as xs
from jax_bridge.torch_interop import to_jax, to_torch
from tests.interop.helpers import jax_mesh, logged, memory
from tests.jax_bridge.helpers import in_jax

RULES = {
    "**.*norm*.*": "d",
    re.compile(r"layers\.\d+\..*attn.*weight"): "o/tp i",
    "**.*weight": "o i/tp",
    "**": "...",
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32), 2)


@in_jax
def test_a_state_dict_goes_round_bit_by_bit() -> None:
    mesh = jax_mesh(tp=1)
    state = model().state_dict()
    with logged() as lines:
        arrays = to_jax(state, RULES, mesh)
    assert not lines and type(arrays) is OrderedDict and [*arrays] == [*state]
    assert arrays["layers.1.self_attn.in_proj_weight"].sharding.spec == jax.P("tp", None)
    assert arrays["layers.0.linear1.weight"].sharding.spec == jax.P(None, "tp")
    back = to_torch(arrays, RULES)
    assert all(
        torch.equal(back[name], x) and memory(back[name]) == memory(x) for name, x in state.items()
    )
    model().load_state_dict(back)


@in_jax
def test_leaves_are_lists_where_a_process_has_several_devices() -> None:
    mesh = jax_mesh(tp=2)
    tree = {"a": [torch.zeros(2, 3), torch.ones(2, 3)], "b": {"c": ([torch.ones(4)] * 2,)}}
    arrays = to_jax(tree, {"a": "o/tp i", "b.c.0": "d"}, mesh)
    assert arrays["a"].shape == (4, 3) and arrays["b"]["c"][0].shape == (4,)
    back = to_torch(arrays, {"a": "o/tp i", "b.c.0": "d"})
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    moved = to_jax(tree, {"a": "o/tp i -> o i", "**": "d"}, mesh)
    assert np.asarray(moved["a"]).sum() == 6 and moved["a"].sharding.spec == jax.P(None, None)


@in_jax
def test_a_mismatch_of_leaves_with_rules_is_listed() -> None:
    tree = {f"w{i}": torch.zeros(2) for i in range(12)}
    with pytest.raises(
        xs.XshardError, match=r"no rule for 11 of 12 names: w1, w10, .* and 3 more"
    ) as caught:
        to_jax(tree, {"w0": "d", "v": "d"}, jax_mesh(tp=1))
    assert "rule 'v' fits no name" in str(caught.value) and "the rules are for: 'w0'" in str(
        caught.value
    )


@in_jax
def test_no_leaf_is_copied_where_one_is_refused() -> None:
    tree = {"first": torch.zeros(4, 4).T, "second": torch.zeros(3), "third": torch.zeros(3).long()}
    for rules, kind, name in (
        ({"second": "d/xx", "**": "..."}, xs.errors.NotationError, "second"),
        ({"**": "..."}, xs.errors.DtypeError, "third"),
    ):
        with logged() as lines, pytest.raises(kind, match=f"^leaf '{name}': "):
            to_jax(tree, rules, jax_mesh(tp=1))
        assert not lines  # the first would be copied


@in_jax
def test_a_leaf_without_a_mesh_is_named() -> None:
    with pytest.raises(xs.errors.MeshError, match="leaf 'a': the array is not on a mesh"):
        to_torch({"a": jax.numpy.zeros(3)}, {"**": "..."})


@in_jax
def test_progress_counts_bytes() -> None:
    tree = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    seen = []
    to_jax(tree, {"**": "..."}, jax_mesh(tp=1), progress=lambda *n_bytes: seen.append(n_bytes))
    assert seen == [(16, 40), (40, 40)]


@in_jax
def test_a_bar_is_shown_when_asked_for() -> None:
    arrays = to_jax({"a": torch.zeros(4)}, {"**": "..."}, jax_mesh(tp=1))
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        to_torch(arrays, {"**": "..."}, progress=True)
    with contextlib.redirect_stderr(io.StringIO()) as silent:
        to_torch(arrays, {"**": "..."})
    assert "to torch" in shown.getvalue()
    assert not silent.getvalue()
