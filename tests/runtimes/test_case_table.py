"""The table of cases on every runtime: values and gradients equal to the last bit.

A runtime runs the whole table once; each answer is a test. A runtime that is missing or dies fails all of
its tests. Each has a class, which pytest-xdist keeps in one process (--dist=loadscope), so that none runs
twice.
"""

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np
import pytest

import xshard as xs
from jax_bridge.lower.transports import rounds
from tests import oracle
from tests.cases import CASES, one_of_each
from xshard.plans.transfer import Transfer
from xshard.steps import AllReduce, ReduceScatter, Step
from xshard.testing.plans import RUNTIMES, Verdict, in_numpy, judge, plan_question

QUESTIONS = {case.name: plan_question(case.plan(), seed) for seed, case in enumerate(CASES)}
RUNTIME = {runtime.name: runtime for runtime in RUNTIMES}
# Runtimes that share the cases: what a framework gets wrong in a kind, it gets wrong in every second of it.
TURNS = {"torch": 0, "jax-vma": 1}


def names_for(runtime):
    """The cases that a runtime runs: one of each kind of step on each mesh, and of the others each on one.

    Without types `shard_map` runs the rules that it runs with types, and `pmap` too: one case of each kind.
    """
    names = [case.name for case in CASES if runtime.takes(case.mesh)]
    first = one_of_each({name: QUESTIONS[name].plan for name in names})
    turn = TURNS.get(runtime.name)
    if turn is None:
        return first
    return [name for i, name in enumerate(names) if i % len(TURNS) == turn or name in first]


def sends_what_is_planned(runtime, plan):
    """JAX pads uneven blocks and messages to the largest, and XLA on CPUs adds no bfloat16."""
    plans = [plan, plan.backward] if plan.src.is_linear else [plan]
    stages = [stage for p in plans for stage in p.stages]
    even = all(end.is_even for stage in stages for end in (stage.before, stage.after))
    adds = any(isinstance(step, AllReduce | ReduceScatter) for p in plans for step in p.steps)
    exact = even and not (adds and plan.dtype == "bfloat16") and not any(map(pads, stages))
    return runtime.name == "torch" or exact


def pads(stage):
    """Whether a round of an exchange is as long as a message that the busiest device does not get."""
    if stage.step.kind != "exchange":
        return False
    sent = rounds(stage.step, stage.before).sent
    return sum(max(m.size for m in r) for r in sent) != stage.step.traffic(stage.before).received


def pytest_generate_tests(metafunc):
    """`name`: every case that the runtime takes; `counted_name`: cases with the plan's bytes."""
    runtime = getattr(metafunc.cls, "runtime", None)
    if runtime is not None:
        names = names_for(runtime)
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", names)
        else:
            exact = [name for name in names if sends_what_is_planned(runtime, QUESTIONS[name].plan)]
            metafunc.parametrize("counted_name", exact)


@pytest.fixture(scope="class")
def answers(request):
    """The answers of a runtime, by the name of the case."""
    runtime = request.cls.runtime
    names = names_for(runtime)
    return dict(
        zip(names, runtime.answers([QUESTIONS[name] for name in names], timeout_s=500), strict=True)
    )


class Table:
    """What holds on every runtime."""

    def test_case_agrees_with_numpy(self, answers, name):
        assert judge(answers[name], in_numpy(QUESTIONS[name])) == Verdict(0, 0)

    def test_bytes_are_those_planned(self, answers, counted_name):
        """Counted at torch's process groups and in XLA's optimised programs."""
        answer = answers[counted_name]
        plan = QUESTIONS[counted_name].plan
        assert answer.forward_bytes == plan.bytes_received
        if plan.src.is_linear:
            assert answer.backward_bytes == plan.backward.bytes_received


class TestTorch(Table):
    runtime = RUNTIME["torch"]


class TestJaxVma(Table):
    runtime = RUNTIME["jax-vma"]


class TestJaxNovma(Table):
    runtime = RUNTIME["jax-novma"]


class TestJaxPmap(Table):
    runtime = RUNTIME["jax-pmap"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_reference_does_what_the_layouts_say(name):
    """Forward the array stays as it is; backward is the adjoint. For winners see plans/test_max_min.py."""
    question = QUESTIONS[name]
    plan = QUESTIONS[name].plan
    answer, [inputs] = in_numpy(question), question.inputs
    x = oracle.gather(inputs, plan.src, plan.mesh, plan.shape)
    expected = x.transpose(
        [plan.source.layout.names.index(name) for name in plan.target.layout.names]
    )
    result = oracle.gather(answer.outputs["output"], plan.dst, plan.mesh, plan.target.shape)
    assert np.array_equal(result, expected)
    if plan.src.is_linear:
        linear = xs.reference.run(plan.tangent, inputs)  # without what a boundary fills in
        forward = oracle.paired(linear, question.cotangents, plan.dst, plan.mesh)
        assert forward == oracle.paired(inputs, answer.gradients[0], plan.src, plan.mesh)


def test_the_table_has_a_row_for_every_step():
    plans = [question.plan for question in QUESTIONS.values()]
    plans += [plan.backward for plan in plans if plan.src.is_linear]
    used = {step.kind for plan in plans for step in plan.steps}
    assert Step.registry.keys() - used == {Transfer.kind}  # between two meshes, in test_transfer.py


def test_every_runtime_has_a_class():
    tested = {table.runtime.name for table in Table.__subclasses__()}
    assert RUNTIME.keys() - tested == {"numpy"}


def test_cases_are_of_every_size():
    sizes = {case.mesh.n_devices for case in CASES}
    assert {4, 8} <= sizes and max(sizes) == 8
    assert sum(case.has_single_axis for case in CASES) >= 40
