"""`profile="auto"`: which profile a kind of device has, and what overrides it."""

import os
import re
import warnings

import pytest

import xshard as xs
from xshard.cost.machine import KINDS, machine_of, resolve_profile, without_devices

NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "AMD Instinct MI300X": "mi300x",
    "TPU v5 lite": "tpu_v5e",
    "TPU v5p": "tpu_v5p",
    "TPU v5": "tpu_v5p",
    "TPU v6 lite": "tpu_v6e",
    "TPU v6e": "tpu_v6e",
    "gloo": "gloo",
    "host": "host",
}


@pytest.mark.parametrize("kind", NAMES)
def test_kinds_of_devices_have_the_profile_of_their_machine(kind):
    profile = machine_of(kind, None)
    assert profile == xs.load_profile(NAMES[kind]) and len(profile.source) > 100
    assert set(KINDS.values()) == set(NAMES.values())


def test_nodes_are_as_large_as_the_launcher_says():
    profile = machine_of("NVIDIA H100 80GB HBM3", 4)
    assert (profile.name, profile.node_devices) == ("h100:4", 4) and profile == xs.load_profile(
        "h100:4"
    )
    assert machine_of("NVIDIA H100 80GB HBM3", 8) == xs.load_profile("h100")
    assert machine_of("NVIDIA GB200", 4).node_devices == 72, "a node is a rack there, not a host"
    assert (
        machine_of("gloo", 4) == xs.load_profile("gloo:4")
        and machine_of("gloo", None).name == "gloo"
    )
    assert machine_of("TPU v6e", 4) == xs.load_profile("tpu_v6e"), "it has one kind of link"
    for wrong in ("h100:0", "h100:x", "tpu_v6e:4"):
        with pytest.raises(xs.errors.ProfileError, match="'h100:4' has nodes of 4"):
            xs.load_profile(wrong)


def test_an_unknown_kind_warns_once():
    with pytest.warns(
        UserWarning, match="no profile for devices of the kind 'Abacus 3'.*xshard calibrate"
    ):
        assert machine_of("Abacus 3", None) == xs.load_profile("h100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine_of("Abacus 3", None)


def test_a_file_that_was_rewritten_is_read_again(monkeypatch, tmp_path):
    def planned(profile):
        return xs.plan("n/a d -> n d", xs.Mesh(a=8), (8, 4), profile=profile).profile.node_devices

    file = tmp_path / "mine.json"
    for turn, nodes in enumerate((4, 2)):
        file.write_text(xs.load_profile(f"h100:{nodes}").to_json())
        os.utime(file, ns=(turn, turn))
        monkeypatch.setenv("XSHARD_PROFILE", str(file))
        assert planned(file) == planned(str(file)) == planned("auto") == nodes
        monkeypatch.setenv("XSHARD_PROFILE", f"a100:{nodes}")
        assert planned("auto") == nodes


@pytest.mark.parametrize("wrong", [{}, [], 3])
def test_what_is_no_name_of_an_option(wrong):
    for option, error in (("profile", xs.XshardError), ("dtype", xs.errors.DtypeError)):
        with pytest.raises(error, match=re.escape(str(wrong))):
            xs.plan("n/a -> n", xs.Mesh(a=2), (8,), **{option: wrong})


def test_what_overrides_what(monkeypatch):
    mesh = xs.Mesh(a=8)

    def planned(profile="auto"):
        return xs.plan("n/a d -> n d", mesh, (8, 4), profile=profile)

    assert (
        resolve_profile("auto") == "auto"
        and without_devices("auto") == "h100" == planned().profile.name
    )
    monkeypatch.setenv("XSHARD_PROFILE", "a100:4")
    assert planned().profile.name == "a100:4" and "priced for a100:4" in str(planned())
    with xs.use_profile("tpu_v6e") as machine:
        assert planned().profile == machine and planned("b200").profile.name == "b200"
        with xs.use_profile(xs.load_profile("gloo")):
            assert planned().profile.name == "gloo"
        assert planned().profile == machine
    assert planned().profile.name == "a100:4"
    with (
        pytest.raises(xs.errors.ProfileError, match="no profile 'abacus'"),
        xs.use_profile("abacus"),
    ):
        pass


def test_a_plan_is_read_back_with_its_machine():
    plan = xs.plan("n/a d -> n d", xs.Mesh(a=8), (8, 4), profile="h100:4")
    assert xs.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", sorted(set(KINDS.values()) - {"gloo", "host"}))
def test_figures_of_accelerators_are_of_one_order(name):
    profile = xs.load_profile(name)
    assert (
        1e13 < profile.flops("float32") <= profile.flops("bfloat16") <= profile.flops("int8") < 1e16
    )
    assert 5e10 < profile.default.bytes_per_s < profile.copy_bytes_per_s < 5e12
    assert profile.across is None or profile.across.bytes_per_s < profile.default.bytes_per_s


def test_phases_run_where_they_are_faster_than_a_ring():
    """Between slow nodes, not between nodes of eight H100, which have a port each."""

    def has_phases(profile, x=8, axes=("node", "x")):
        return xs.load_profile(profile).fabric(xs.Mesh(node=2, x=x)).has_phases(axes)

    assert has_phases("gloo:8") and has_phases("h100:2", 2) and not has_phases("h100")
    assert not has_phases("gloo") and not any(
        has_phases("gloo:8", axes=(axis,)) for axis in ("node", "x")
    )
