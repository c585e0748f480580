"""The axes that hold one value, the tolerance between replicas, and the error beyond it."""

import numpy as np
import pytest

import xshard as xs
from xshard import replicas, tolerances
from xshard.arguments import is_on
from xshard.replicas import ReplicaCheck, are_replicas_checked

MESH = xs.Mesh(dp=2, tp=2, one=1)


def check_of(layout, dtype="float32", cotangents=True):
    sharding = xs.Sharding(xs.Layout.parse(layout), MESH, (4, 4))
    return ReplicaCheck(sharding, MESH, dtype, f"n d -> {layout}", cotangents)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("n d", ("dp", "tp")),
        ("n/tp d", ("dp",)),
        ("n d | sum(dp)", ("tp",)),
        ("n/one d | copy(dp) mean(tp)", ("dp",)),
        ("n/tp d:halo(1,1) | max(dp)", ()),
    ],
)
def test_axes_along_which_blocks_are_equal(layout, axes):
    assert check_of(layout).axes == axes


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float64", 2**-26),
        ("bfloat16", 2**-3.5),
        ("complex64", 2**-11.5),
        ("int64", 0),
        ("bool", 0),
    ],
)
def test_tolerance_is_the_root_of_the_precision(dtype, tolerance):
    assert tolerances.replicas(dtype) == tolerance


def table(*differences, largest=2.0):
    """Findings of four devices along `dp` and `tp`: (difference, largest value)."""
    found = np.full((4, 2, 2), largest)
    found[..., 0] = np.reshape(differences, (4, 2))
    return found


def test_the_verdict():
    check = check_of("n d")
    assert check.fault(table(*[0] * 8)) is None
    assert check.fault(table(*[6e-4] * 8)) is None  # 2 * 2**-11.5 is 6.9e-4
    error = check.fault(table(0, 0, 0, 8e-4, 0, 0, 0, 0), names=(10, 11, 12, 13))
    assert isinstance(error, xs.errors.ReplicaError)
    assert str(error).splitlines() == [
        "cotangents differ along 'tp', where one value is meant in",
        "    'n d -> n d'",
        "            ^^^",
        "  by 0.0008 on ranks 10, 11, where the largest value is 2",
        "  if each device uses its result in its own way, say so: copy(tp) on the right",
    ]
    assert "devices 1, 3" in str(check.fault(table(0, 0, np.inf, 0, 0, 0, np.inf, 0)))


def test_the_hint_of_each_case():
    different = table(*[1] * 8)
    assert "copy(dp) on the right" in check_of("n d/tp").fault(different[:, :1]).hint
    assert "reduce sum(dp) before" in check_of("n d/tp | copy(dp)").fault(different[:, :1]).hint
    entering = check_of("n d", cotangents=False).fault(different)
    assert "on the left, as sum(dp), mean(dp) or n/dp" in entering.hint
    assert entering.text[slice(*entering.span)] == "n d"


def test_a_call_overrules_the_environment(monkeypatch):
    for always in (True, False):
        monkeypatch.setattr(replicas, "ALWAYS", always)
        assert are_replicas_checked(None) is always
        assert are_replicas_checked(True) and not are_replicas_checked(False)


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("yes", True), ("0", False), ("", False), (None, False)]
)
def test_what_switches_a_check_on(monkeypatch, value, on):
    monkeypatch.delenv("XSHARD_A_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("XSHARD_A_CHECK", value)
    assert is_on("XSHARD_A_CHECK") is on
