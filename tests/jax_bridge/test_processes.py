"""The case table on several processes: devices of each in every mesh, gloo between them."""

import pytest

from tests.cases import CASES, one_of_each
from tests.jax_bridge.helpers import GPU, host, joined, needs_gpu
from xshard.testing.plans import in_numpy, judge, plan_question
from xshard.testing.question import Answer

QUESTIONS = {case.name: plan_question(case.plan(), seed) for seed, case in enumerate(CASES)}


def merged(parts):
    """Blocks by name of several processes, each with None for blocks of others."""
    blocks = {}
    for name in parts[0]:
        by_device = zip(*(part[name] for part in parts), strict=True)
        held = [[block for block in blocks if block is not None] for blocks in by_device]
        assert all(len(one) == 1 for one in held)  # every device is one process's own
        blocks[name] = tuple(one[0] for one in held)
    return blocks


def check(environments, names) -> None:
    """Values and gradients of these cases are those of numpy."""
    with joined(environments) as ask:
        by_process = ask("jax_bridge.testing.worker.answers", [QUESTIONS[name] for name in names])
    wrong = []
    for name, parts in zip(names, zip(*by_process, strict=True), strict=True):
        answer = Answer(
            merged([part.outputs for part in parts]), merged([part.gradients for part in parts])
        )
        verdict = judge(answer, in_numpy(QUESTIONS[name]))
        if not verdict.agrees:
            wrong.append((name, verdict))
    assert not wrong


@pytest.mark.parametrize("processes", [2, 4])
def test_every_case_is_right_over_processes(processes: int) -> None:
    """On 2 x 4 and 4 x 2 devices. Their numbers are not contiguous: those of a process begin at a multiple
    of 2048, and a mesh takes the processes in turn. One case of each kind: one process runs them all. Two
    processes, which compile half as much, run one on every mesh."""
    plans = {name: q.plan for name, q in QUESTIONS.items() if q.mesh.n_devices % processes == 0}
    names = one_of_each(plans, meshes=processes == 2)
    assert len(names) > (25 if processes == 2 else 8)
    check([host(8 // processes)] * processes, names)


@pytest.mark.parametrize("processes", [2, 4])
@needs_gpu
def test_every_case_by_nccl(processes: int) -> None:
    """Processes that share one GPU: to NCCL, which refuses that, each is a host of its own."""
    names = [name for name, question in QUESTIONS.items() if question.mesh.n_devices == processes]
    shared = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    shared["XLA_FLAGS"] = "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true"
    check([GPU | shared | {"NCCL_HOSTID": f"process {i}"} for i in range(processes)], names)
