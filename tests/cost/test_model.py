"""The alpha-beta model, and the profiles it reads its constants from."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import xshard as xs
from tests.messages import refused
from xshard.errors import ProfileError
from xshard.layout.sub_axes import SubAxisMesh
from xshard.steps import Permute, Traffic
from xshard.steps.permute import sender_of_each_device
from xshard.steps.traffic import Hop

SLOW = xs.Link(1e-5, 1e9)
FAST = xs.Link(1e-6, 1e11)
LAUNCH = (("exchange", 3e-5), ("other", 2e-5))
MACHINE = xs.Profile(
    "machine", "made up", SLOW, axes=(("tp", FAST),), launch_s=LAUNCH, copy_bytes_per_s=1e12
)
MESH = xs.Mesh(dp=2, tp=4)
HOPS = Hop("dp", 1000, 1, 0), Hop("tp", 4000, 3, 1)
GOOD = {
    "name": "mine",
    "source": "measured",
    "default": {"latency_s": 1e-6, "bytes_per_s": 1e9},
    "axes": {"tp": {"latency_s": 0.0, "bytes_per_s": 1e11}},
    "launch_s": {"other": 1e-6},
    "copy_bytes_per_s": None,
}


def seconds_of(kind, traffic, itemsize):
    return MACHINE.fabric(MESH).seconds(kind, traffic, itemsize)


def test_a_step_pays_for_all_that_it_does():
    traffic = Traffic(5000, 700, HOPS)
    over_dp = 1 * 1e-5 + 1000 * 2 / 1e9
    over_tp = 3 * 1e-6 + 4000 * 2 / 1e11
    copied = 700 * 2 / 1e12
    assert math.isclose(seconds_of("all_gather", traffic, 2), 2e-5 + over_dp + over_tp + copied)
    assert math.isclose(seconds_of("exchange", traffic, 2), 3e-5 + over_dp + over_tp + copied)


def test_a_local_step_pays_its_copies_only():
    copied = 700 * 2 / 1e12
    assert (
        seconds_of("slice", Traffic(copied=700), 2) == copied
    )  # a local step pays its copies only


def test_an_exchange_in_rounds_starts_one_for_every_message():
    by_rounds = replace(MACHINE, rounds=True).fabric(MESH).seconds
    traffic = Traffic(5000, 700, HOPS, saved_copies=100)
    other = Traffic(5000, 700, HOPS)
    more = by_rounds("exchange", traffic, 2) - seconds_of("exchange", traffic, 2)
    assert math.isclose(more, 3 * 3e-5 - 100 * 2 / 1e12)
    assert by_rounds("exchange", Traffic(copied=700, saved_copies=100), 2) == 3e-5 + 600 * 2 / 1e12
    assert by_rounds("all_gather", other, 2) == seconds_of("all_gather", other, 2)


@pytest.mark.parametrize(
    ("expression", "rounds"),
    [
        ("n/dp/tp d -> n d", 7),  # one ring of all eight
        ("n/tp d -> n d", 3),
        ("n d | sum(dp,tp) -> n d", 14),  # a reduce-scatter and a gather
        ("n d | sum(dp) -> n/dp d", 0),  # a kind that runs in no ring
    ],
)
def test_a_ring_pays_each_of_its_rounds(expression, rounds):
    ring_s = (("all_gather", 1.0), ("all_reduce", 1.0))
    launch_s = (("exchange", 1.0), ("other", 0.0))
    plain = xs.Profile("plain", "made up", SLOW, launch_s=launch_s, copy_bytes_per_s=1e12)
    plan = xs.plan(expression, MESH, (8, 64), profile=plain)
    rings = replace(plan, profile=replace(plain, ring_s=ring_s))
    assert len(plan.steps) == 1 and rings.cost - plan.cost == pytest.approx(rounds)


@pytest.mark.parametrize(
    ("expression", "sizes", "share"),
    [
        ("n/node/x d -> n/x/node d", (2, 2), 1 / 2),  # one of two devices has what it takes
        ("n/node/x d -> n/x/node d", (4, 8), 3 / 4),
        ("n/node/x d -> n/x/node d", (8, 2), 1),  # both devices of some nodes take from others
        ("n/node d -> n/x d", (2, 2), 1 / 2),
    ],
)
def test_devices_that_receive_alone_have_the_port_of_their_node_to_themselves(
    expression, sizes, share
):
    mesh = xs.Mesh(node=sizes[0], x=sizes[1])
    for topology, part in (("port", share), ("switch", 1)):
        across = xs.Link(0.0, 1e6, topology)
        nodes = xs.Profile(
            "nodes", "made up", xs.Link(0.0, 1e15), across=across, node_devices=sizes[1]
        )
        plan = xs.plan(expression, mesh, (64, 64), profile="h100")
        step = Permute(plan.dst)
        block = plan.source.max_local_size
        traffic = step.traffic(plan.source, nodes.link_spans(mesh))
        seconds = nodes.fabric(mesh).seconds("permute", traffic, 1)
        assert math.isclose(seconds, part * block / 1e6), topology
        given = np.array(sender_of_each_device(plan.source, plan.target)).reshape(sizes) // sizes[1]
        assert (given != np.arange(sizes[0])[:, None]).mean(1).max() == share


def test_levels_are_links_the_slowest_first():
    spans = MACHINE.link_spans(xs.Mesh(tp=4, dp=2, pp=3))
    found = [(span.axis, span.size, span.level) for span in spans]
    assert found == [("dp", 2, 0), ("pp", 3, 0), ("tp", 4, 1)]
    assert {span.level for span in xs.load_profile("bandwidth").link_spans(MESH)} == {0}


def test_axes_that_leave_a_node_have_the_link_between_nodes():
    nodes = xs.Profile("nodes", "made up", FAST, across=SLOW, node_devices=8)
    mesh = xs.Mesh(dp=4, cp=2, tp=4)
    assert [nodes.link(axis, mesh) for axis in mesh.axes] == [SLOW, FAST, FAST]
    assert [(span.axis, span.level) for span in nodes.link_spans(mesh)] == [
        ("dp", 0),
        ("cp", 1),
        ("tp", 1),
    ]


def spans_with_links(profile, mesh, axes):
    fabric = profile.fabric(mesh)
    spans = [span for span in fabric.spans if span.axis in axes]
    return [(span.axis, span.size, span.stride, fabric.links[span.level]) for span in spans]


@pytest.mark.parametrize("node_devices", [2, 4, 8, 16])
@pytest.mark.parametrize("axes", [("dp",), ("cp", "tp"), ("dp", "tp"), ("pp", "dp", "cp")])
def test_axes_on_their_own_keep_their_links(axes, node_devices):
    nodes = xs.Profile("nodes", "made up", FAST, across=SLOW, node_devices=node_devices)
    mesh = xs.Mesh(pp=2, dp=4, cp=2, tp=4)
    alone = xs.Mesh({axis: mesh.size(axis) for axis in axes})
    part = nodes.for_axes(axes, mesh)
    assert spans_with_links(part, alone, axes) == spans_with_links(nodes, mesh, axes)
    assert part.for_axes(axes, alone) == part
    split = tuple(
        (a, (2, 2)) for a in axes if mesh.size(a) == 4
    )  # and divided, where the devices are alike
    if split:
        fine = [SubAxisMesh(at, split) for at in (alone, mesh)]
        assert spans_with_links(part, fine[0], fine[0].axes) == spans_with_links(
            nodes, fine[1], fine[0].axes
        )


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1.0, 1e9), (math.inf, 1e9), (math.nan, 1e9), (0.0, 0.0)]
)
def test_links_that_cannot_be(latency, bandwidth):
    message = (
        f"no such link: {latency} s, {bandwidth} bytes/s\n  a latency is >= 0 and a bandwidth > 0"
    )
    with refused(ProfileError, message):
        xs.Link(latency, bandwidth)


@pytest.mark.parametrize("name", ["h100", "h200", "tpu_v5p", "gloo", "host"])
def test_shipped_profiles_of_machines_know_rates_of_operations(name):
    profile = xs.load_profile(name)
    assert 1e9 < profile.flops("float32") <= profile.flops("int32") < 1e15
    assert profile.flops("bfloat16") <= 1e15
    plain = xs.load_profile("bandwidth")
    assert (
        plain.name == "bandwidth" and len(plain.source) > 40 and math.isinf(plain.flops("float32"))
    )


def test_a_profile_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    profile = xs.load_profile(path)
    assert (profile.name, profile.copy_bytes_per_s) == ("mine", math.inf)
    assert profile.link("tp", MESH) == xs.Link(0.0, 1e11)
    assert xs.plan("n/tp -> n", MESH, (8,), profile=str(path)).profile == profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("{", "is malformed: "),
        ("[]", "is malformed: "),
        ({"default": None}, "lacks a link for axes that it does not name"),
        ({"default": {"latency_s": 0.0}}, "is malformed: "),
        ({"default": {"latency_s": 0.0, "bytes_per_s": -1}}, "no such link"),
        ({"axes": [1]}, "is malformed: "),
        ({"flops_per_s": [1e12]}, "is malformed: "),
        ({"flops_per_s": {"float32": 0}}, "no such rate: 0 operations per second in 'float32'"),
        ({"flops_per_s": {"float32": "1e12"}}, "no such rate: '1e12' operations per second"),
        ({"flops_per_s": {"bf16": 1e12}}, "a rate is > 0, by the name of a dtype"),
    ],
)
def test_malformed_profiles(tmp_path, changes, message):
    path = tmp_path / "bad.json"
    changed = changes if isinstance(changes, str) else GOOD | changes
    if changes == {"default": None}:
        del changed["default"]
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ProfileError, match=re.escape(message)):
        xs.load_profile(path)


def test_an_unknown_profile_names_those_that_are_shipped():
    shipped = sorted(
        path.stem for path in (Path(xs.__file__).parent / "cost" / "profiles").glob("*.json")
    )
    with refused(
        ProfileError, f"no profile 'abacus'\n  shipped are: {', '.join(shipped)}; or give a file"
    ):
        xs.load_profile("abacus")


def test_on_a_ring_messages_pass_devices_on_their_way():
    """A quarter of a ring of 8 on average: two hops. An all-gather goes from neighbour to neighbour."""
    ring = xs.Profile("ring", "made up", xs.Link(0.0, 1e9, "ring"))
    moved, gathered = (
        xs.plan(f"n/x d -> {dst}", xs.Mesh(x=8), (8, 8), profile=ring) for dst in ("n d/x", "n d")
    )
    assert [plan.steps[0].kind for plan in (moved, gathered)] == ["all_to_all", "all_gather"]
    assert math.isclose(moved.cost, 2 * moved.bytes_received / 1e9)
    assert math.isclose(gathered.cost, gathered.bytes_received / 1e9)
