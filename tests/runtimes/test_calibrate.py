"""Calibration: the fit finds the constants that made the times, and profiles come back from files.

No test looks at a clock but the last, which only asks that the whole way runs.
"""

import math
import os
import re
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import xshard as xs
from xshard.cli.app import app
from xshard.runtimes import backends, disk
from xshard.runtimes import calibrate as calibration
from xshard.runtimes.fit import Sample, fit, median_error
from xshard.runtimes.samples import SIZES, fitted_plans, held_out_plans
from xshard.steps import Step

MESH = xs.Mesh(dp=2, cp=4)
LAUNCHES = {"all_gather": 1.5e-5, "all_reduce": 4e-5, "all_to_all": 2.5e-5, "exchange": 3e-5}
LAUNCHES |= {"permute": 1e-5, "reduce_scatter": 2e-5}
TIMES = {"launch_s": tuple(sorted({**LAUNCHES, "other": 4e-5}.items())), "copy_bytes_per_s": 1e10}
ONE_LINK = xs.Profile("made", "made up", default=xs.Link(3e-6, 2e9), **TIMES)
SLOW = xs.Link(9e-6, 1e9)
FAST = xs.Link(2e-6, 8e9)
RATES = (("bfloat16", 4e11), ("float32", 1e11))
TWO_LINKS = replace(ONE_LINK, default=SLOW, axes=(("cp", FAST), ("dp", SLOW)))
SWAPPED = replace(ONE_LINK, default=SLOW, axes=(("cp", SLOW), ("dp", FAST)))
IN_ROUNDS = replace(ONE_LINK, rounds=True)
IN_RINGS = replace(ONE_LINK, ring_s=(("all_gather", 7e-6), ("all_reduce", 5e-6)))
PORT = replace(SLOW, topology="port")
OVER_NODES = [replace(ONE_LINK, default=FAST, across=PORT, node_devices=n) for n in (2, 4)]
ONE_A_NODE = replace(ONE_LINK, default=PORT, across=PORT, node_devices=1)


def timed(profile, plans=None):
    """Plans with the seconds that they would take on the machine of a profile."""
    plans = fitted_plans(MESH) if plans is None else plans
    return [Sample(plan, replace(plan, profile=profile).cost) for plan in plans]


# --- the fit


@pytest.mark.parametrize(
    "profile",
    [ONE_LINK, TWO_LINKS, SWAPPED, IN_ROUNDS, IN_RINGS, *OVER_NODES, ONE_A_NODE],
    ids=[
        "one link",
        "two links",
        "swapped",
        "rounds",
        "rings",
        "half an axis a node",
        "an axis a node",
        "a device a node",
    ],
)
def test_the_fit_finds_the_profile_that_made_the_times(profile):
    """To the last of its digits, whichever axis is slower; the order of levels has to be found too."""
    options = {"rounds": profile.rounds, "node_devices": profile.node_devices}
    assert fit(timed(profile), "made", **options) == replace(profile, source="")


def test_misses_that_balance_move_no_constant():
    """Twice as long counts like half as long: else all constants would come out too small."""
    samples = [s._replace(seconds=s.seconds * f) for s in timed(ONE_LINK) for f in (1 / 1.09, 1.09)]
    found = fit(samples, "made")
    assert math.isclose(found.default.bytes_per_s, ONE_LINK.default.bytes_per_s, rel_tol=1e-3)
    assert math.isclose(found.launch("all_reduce"), ONE_LINK.launch("all_reduce"), rel_tol=1e-3)


def test_no_constant_is_negative_where_the_best_fit_would_have_one():
    """Large messages faster than small ones: a line through these would start below zero."""
    plans = [p for p in fitted_plans(MESH) if p.steps[0].kind == "all_gather"]
    found = fit([Sample(p, (p.bytes_received + 1) ** 1.5 * 1e-9) for p in plans], "odd")
    assert found.default.latency_s >= 0
    assert all(seconds >= 0 for _, seconds in found.launch_s)


def test_the_error_is_the_median_of_absolute_relative_errors():
    exact = timed(ONE_LINK, held_out_plans(MESH, count=3))
    samples = [
        s._replace(seconds=s.seconds * f) for s, f in zip(exact, (2.0, 0.8, 1.0), strict=True)
    ]
    errors = [s.error(ONE_LINK) for s in samples]
    assert errors == pytest.approx([-0.5, 0.25, 0.0])
    assert median_error(samples, ONE_LINK) == pytest.approx(0.25)


def test_single_times_that_are_far_too_long_move_no_constant_far():
    """As on a machine that others use: every tenth plan takes ten times as long."""
    samples = [
        s._replace(seconds=s.seconds * (1 if i % 10 else 10)) for i, s in enumerate(timed(ONE_LINK))
    ]
    found = fit(samples, "made")
    assert math.isclose(found.default.bytes_per_s, ONE_LINK.default.bytes_per_s, rel_tol=0.05)
    assert median_error(samples, found) < 0.02


# --- what is measured


def test_fitted_plans_are_one_step_each():
    plans = fitted_plans(MESH)
    assert {len(plan.steps) for plan in plans} == {1}


def test_fitted_plans_are_of_every_kind():
    plans = fitted_plans(MESH)
    assert {plan.steps[0].kind for plan in plans} == {*LAUNCHES, "slice", "embed"}
    assert set(LAUNCHES) < set(Step.registry)


def test_fitted_plans_have_blocks_of_the_sizes_asked_for():
    for size in SIZES:
        ends = [(p.source, p.target) for p in fitted_plans(MESH, (size,))]
        assert {max(end.max_local_size for end in pair) * 4 for pair in ends} == {size}


def test_held_out_plans_are_the_same_every_time():
    plans = held_out_plans(MESH)
    assert plans == held_out_plans(MESH) != held_out_plans(MESH, seed=1)


def test_held_out_plans_move_something_in_several_steps():
    plans = held_out_plans(MESH)
    assert len(plans) == 20
    assert sum(len(plan.steps) > 1 for plan in plans) >= 6
    assert all(plan.bytes_received for plan in plans)


def test_held_out_plans_are_not_fitted():
    plans = held_out_plans(MESH)
    assert not {(p.src, p.dst) for p in plans} & {(p.src, p.dst) for p in fitted_plans(MESH)}


@pytest.mark.parametrize(
    "mesh", [xs.Mesh(dp=2), xs.Mesh(dp=3, one=1), xs.Mesh(a=2, b=2, c=2)], ids=str
)
def test_meshes_with_few_plans_have_enough_of_them(mesh):
    """Over one axis few pairs of layouts communicate; they come again in other sizes."""
    plans = held_out_plans(mesh, SIZES[:3])
    assert len(set(plans)) == 20
    assert all(plan.bytes_received for plan in plans)
    assert {len(plan.steps) for plan in fitted_plans(mesh)} == {1}


def test_every_plan_is_measured_once(monkeypatch):
    plans = fitted_plans(MESH)
    asked = []
    reported = []

    class Answers:
        def ask(self, function, batch, rounds, *, timeout_s, quiet):
            asked.extend(batch)
            assert (function, rounds, timeout_s) == (
                torch.function("worker.seconds_of_plans"),
                3,
                1.0,
            )
            return [plan.cost for plan in batch]

    torch = backends.BACKENDS["torch"]
    monkeypatch.setattr(backends.Backend, "process", lambda backend, n_devices: Answers())
    seconds = calibration.measure(
        torch, plans, 3, progress=lambda *n: reported.append(n), timeout_s=1.0
    )
    assert seconds == [plan.cost for plan in plans]
    assert len(asked) == len(plans) and asked != list(plans)
    assert reported[0] == (0, len(plans)) and reported[-1] == (len(plans), len(plans))


@pytest.mark.parametrize(
    ("milliseconds", "slowdown", "overlap"),
    [
        ((10, 10, 22, 16), 1.2, 0.6),  # of 12 and of 10, 6 are hidden
        ((10, 10, 20, 10), 1.0, 1.0),
        ((10, 30, 42, 42), 1.2, 0.0),
        ((10, 10, 18, 20), 1.0, 0.0),  # noise is no gain, and no loss
        ((10, 10, 10, 9), 1.0, 0.0),  # nothing was there to hide
    ],
)
def test_moves_beside_computing(monkeypatch, milliseconds, slowdown, overlap):
    """The seconds of moves, of products, of both in turn and of both at once, on the slower rank."""
    from torch_bridge.testing import worker

    of_rank = [[ms * 1e-3] for ms in milliseconds]
    faster = [[ms * 0.5e-3] for ms in milliseconds]
    monkeypatch.setattr(worker, "by_rank", lambda *_args, **_how: iter([[faster, of_rank]] * 2))
    found = worker.moves_beside_products([None, None], 512, 1, timeout_s=1.0)
    assert found == pytest.approx((slowdown, overlap))


def test_a_disk_is_read_rather_than_memory(tmp_path, monkeypatch):
    """On a clock of its own: 2 ms a read and 1 GB/s, and nothing for what was read since it was forgotten."""
    now = [0.0]
    kept = set()
    pread = os.pread

    def slow(file, n_bytes, at):
        if at not in kept:
            now[0] += 2e-3 + n_bytes / 1e9
        kept.add(at)
        return pread(file, n_bytes, at)

    monkeypatch.setattr(os, "posix_fadvise", lambda file, at, n, what: kept.clear())
    monkeypatch.setattr(os, "pread", slow)
    monkeypatch.setattr(disk.time, "perf_counter", lambda: now[0])
    found = disk.measure_disk(tmp_path, 4 * 2**22)
    assert found == xs.Link(2.004e-3, float(f"{2**22 / (2e-3 + 2**22 / 1e9):.4g}"))
    assert list(tmp_path.iterdir()) == []


# --- profiles as files


@pytest.mark.parametrize(
    "profile",
    [
        *(ONE_LINK, TWO_LINKS, IN_ROUNDS, replace(ONE_LINK, flops_per_s=RATES)),
        replace(ONE_LINK, call_s=1e-5, compiled_overlap=0.5, eager_overlap=0.25),
        replace(ONE_LINK, layer_efficiency=1.0, step_slowdown=1.5),
        *(xs.load_profile("h100"), xs.load_profile("tpu_v5p")),
    ],
)
def test_a_written_profile_loads(tmp_path, profile):
    path = tmp_path / "mine.json"
    path.write_text(profile.to_json())
    assert xs.load_profile(path) == profile


@pytest.mark.parametrize(
    "profile",
    [
        *(ONE_LINK, TWO_LINKS, IN_ROUNDS, replace(ONE_LINK, flops_per_s=RATES)),
        *(xs.load_profile("h100"), xs.load_profile("tpu_v5p")),
    ],
)
def test_a_written_profile_prices(tmp_path, profile):
    path = tmp_path / "mine.json"
    path.write_text(profile.to_json())
    plan = xs.plan("s/cp c -> s c/cp", MESH, (64, 64), profile=path)
    assert plan.cost == replace(plan, profile=profile).cost > 0


def test_the_shipped_gloo_profile_states_its_errors():
    source = xs.load_profile("gloo").source
    assert re.search(r"measured \d{4}-\d\d-\d\d by `xshard calibrate --backend torch", source)
    error = re.search(r"([\d.]+)% on 20 held-out plans", source)
    assert error is not None and float(error[1]) < 25


# --- what is refused


ONE_DEVICE = (
    "MeshError: nothing to measure on Mesh(dp=1): it has one device\n  as in --mesh dp=2,cp=2"
)


REFUSED = {
    "no measurements": (lambda: fit([], "none"),
        "CalibrationError: nothing to fit links to: none of 0 measurements sends anything"),
    **{
        f"{seconds} s": (
            lambda seconds=seconds: fit([timed(ONE_LINK)[0]._replace(seconds=seconds)], "odd"),
            f"CalibrationError: 'n/dp d -> n d' cannot have taken {seconds} s",
        )
        for seconds in (0.0, -1.0, math.nan, math.inf)
    },
    "one device to fit": (lambda: fitted_plans(xs.Mesh(dp=1)), ONE_DEVICE),
    "one device held out": (lambda: held_out_plans(xs.Mesh(dp=1)), ONE_DEVICE),
    "no folder": (lambda: disk.measure_disk("none"),
        "CalibrationError: none: No such file or directory\n  a folder that can be written to"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, message = REFUSED[name]
    assert refusal(call) == message


def test_measurements_that_send_nothing():
    copies = [s for s in timed(ONE_LINK) if s.plan.steps[0].kind in ("slice", "embed")]
    assert refusal(lambda: fit(copies, "copies")).endswith(
        f"none of {len(copies)} measurements sends anything"
    )


def refusal(call):
    with pytest.raises(xs.XshardError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_a_machine_lacks(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "posix_fadvise")
    assert refusal(lambda: disk.measure_disk(tmp_path)) == (
        "CalibrationError: this system keeps what was read of files in memory\n"
        "  measure on Linux, or write a disk into the profile"
    )
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert refusal(lambda: backends.backend_named("jax")) == (
        "NoRuntimeError: jax is not installed\n  pip install 'xshard[jax]'"
    )
    samples = timed(ONE_LINK)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert refusal(lambda: fit(samples, "none")) == (
        "CalibrationError: a calibration needs scipy\n"
        "  pip install scipy, or xshard with its extra 'calibrate'"
    )


# --- the command


def xshard(*arguments):
    return CliRunner().invoke(app, ("calibrate", *map(str, arguments)))


@pytest.mark.parametrize(("arguments", "message"), [
    (("mpi", "--mesh", "dp=2"), "NoRuntimeError: no backend 'mpi'\n  backends are: torch, jax"),
    (("torch", "--mesh", "dp=1"), ONE_DEVICE),
    (("torch", "--mesh", "dp=2", "--largest", "1KiB"), "XshardError: 1.00 KiB is too small a largest block: "
        "sizes start at 1.00 KiB\n  at least 16.00 KiB"),
    (("torch", "--mesh", "dp=2", "--output", "/no/such/folder/mine.json"),
        "XshardError: no folder '/no/such/folder' to write 'mine.json' to"),
    (("torch", "--mesh", "dp=2", "--disk", "/no/such/folder"),
        "XshardError: no folder '/no/such/folder' whose disk could be measured"),
])  # fmt: skip
def test_what_the_command_refuses(arguments, message):
    refused = xshard("--backend", *arguments)
    assert (refused.exit_code, refused.stderr) == (2, message + "\n")


@pytest.mark.parametrize(
    ("backend", "devices", "rounds", "more"),
    [
        ("torch", "gloo processes", False, ("--disk", ".")),
        ("jax", "host devices", True, ("--plans",)),
    ],
)
def test_two_devices_from_the_command_to_a_priced_plan(
    tmp_path, monkeypatch, backend, devices, rounds, more
):
    monkeypatch.setattr(disk.measure_disk, "__defaults__", (2**22,))
    path = tmp_path / "mine.json"
    small = ("--largest", "16KiB", "--rounds", 2, *more)
    result = xshard("--backend", backend, "--mesh", "dp=2", *small, "--output", path)
    assert result.exit_code == 0, result.stderr
    for line in ("fitted plans", "held-out plans", "% of 20 held-out plans", f"written to {path}"):
        assert line in result.stdout
    fitted = result.stdout.partition("median absolute error")[0]
    kinds = re.findall(r"^ ?(\w+)  ", fitted, re.M)
    plans = fitted.count(" -> ")
    if "--plans" in more:
        assert plans == len(kinds) - 1 > 2 * len(set(kinds))  # less the line of heads
    else:
        assert plans == 0 and len(kinds) == len(set(kinds))  # a row per kind
    profile = xs.load_profile(path)
    assert (profile.name, profile.rounds) == ("mine", rounds)
    assert (profile.disk is not None) == ("; disk " in result.stdout) == ("--disk" in more)
    assert f"2 {devices} " in profile.source
    assert (profile.call_s > 0) == (backend == "torch")
    assert 0 <= profile.eager_overlap <= 1 and (backend == "torch" or profile.eager_overlap == 1)
    assert profile.step_slowdown >= 1 and (backend == "torch" or profile.step_slowdown == 1)
    assert profile.layer_efficiency == 1  # of rates that were measured
    rates = dict(profile.flops_per_s)
    assert rates.keys() == set(calibration.PRODUCTS) and min(rates.values()) > 1e8
    assert ("moves between layers take" in result.stdout) == (backend == "torch")
    assert f"float32 {rates['float32'] / 1e9:.3g} GFLOP/s" in result.stdout
    assert xs.plan("n/dp -> n", xs.Mesh(dp=2), (8,), profile=path).cost > 0
