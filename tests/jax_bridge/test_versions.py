"""Types of releases of JAX after 0.10: unreduced values may be reduced by max or min."""

from enum import Enum
from typing import NamedTuple

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import xshard as xs
from jax_bridge import calls
from jax_bridge.versions import changed_type, cuts_of, manual_type, unreduced_kind
from tests.jax_bridge.helpers import in_jax


class Kind(Enum):
    sum = 1
    max = 2


class Later(NamedTuple):
    """A type along manual axes as JAX 0.12 has it: what is unreduced has a kind, what is not has none."""

    varying: frozenset[str] = frozenset()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    unreduced_kind: Kind | None = None


A = frozenset("a")
NONE = frozenset[str]()


def test_how_addends_add_up_and_the_cuts_of_a_spec_with_tags() -> None:
    assert unreduced_kind(Later(unreduced=A, unreduced_kind=Kind.max)) == "max"
    for a_sum in (
        Later(unreduced=A, unreduced_kind=Kind.sum),
        Later(),
        P("a", unreduced={"b"}),
        None,
    ):
        assert unreduced_kind(a_sum) == "sum"
    assert cuts_of(P("a", None, ("b", "c"), unreduced={"d"}, reduced={"e"})) == (
        "a",
        None,
        ("b", "c"),
    )


def test_a_type_keeps_its_kind_as_long_as_something_is_unreduced() -> None:
    before = Later(unreduced=frozenset("ab"), unreduced_kind=Kind.max)
    some = changed_type(before, varying=A, unreduced=frozenset("b"), reduced=NONE)
    assert some == Later(varying=A, unreduced=frozenset("b"), unreduced_kind=Kind.max)
    assert changed_type(before, varying=A, unreduced=NONE, reduced=NONE) == Later(varying=A)


@in_jax
def test_a_type_of_this_release_changes_its_axes() -> None:
    found = manual_type(jnp.zeros(2))
    changed = changed_type(found, varying=A, unreduced=NONE, reduced=NONE)
    assert (changed.varying, changed.unreduced, changed.reduced) == (A, NONE, NONE)


def test_what_is_unreduced_by_max_is_no_sum(monkeypatch) -> None:
    monkeypatch.setattr(calls, "manual_type", lambda x: Later(unreduced=A, unreduced_kind=Kind.max))
    monkeypatch.setattr(calls, "axes_of_equal_blocks", lambda x, axes: [])
    plan = xs.plan("n | sum(a) -> n", xs.Mesh(a=2), (4,))
    with pytest.raises(xs.errors.NotationError) as caught:
        calls.with_entry_type(None, plan, "n | sum(a) -> n")  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "the block is unreduced along 'a': its max is pending in",
        "    'n | sum(a) -> n'",
        "             ^",
        "  write it on the left: max(a)",
    ]
