"""mixed_parallel.py under Ray Train: DDP, FSDP2 and tensor parallelism on four CPU workers of a TorchTrainer.

    pip install -e '.[ray]'
    python examples/ray_train.py

Ray makes the world of processes, and a mesh is laid over it as under torchrun. A profile given to the script
is XSHARD_PROFILE on all workers. The exit status is 1 if a loss or a gradient differs from one process.
"""

import tempfile
from pathlib import Path

import ray.train
import torch
from mixed_parallel import alone, judge, together
from ray.train.torch import TorchTrainer
from rich.console import Console
from support.runs import options

from torch_bridge.mesh.machine import machine_profile

WORKERS = 4
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # as torchrun has it


def train(config: dict[str, int]) -> None:
    """Train on a worker. The first reports losses and gradients, which all have."""
    results = together(config["steps"])
    where = {
        "machine": machine_profile("auto").name,
        "local": ray.train.get_context().get_local_world_size(),
    }
    with tempfile.TemporaryDirectory() as folder:
        first = ray.train.get_context().get_world_rank() == 0
        if first:
            torch.save(results, Path(folder, "results.pt"))
        ray.train.report(
            where, checkpoint=ray.train.Checkpoint.from_directory(folder) if first else None
        )


def main() -> int:
    parser = options(__doc__, steps=8)
    parser.add_argument("--profile", help="what to plan for; by default the machine that is found")
    chosen = parser.parse_args()
    environment = ENVIRONMENT | ({"XSHARD_PROFILE": chosen.profile} if chosen.profile else {})
    ray.init(num_cpus=WORKERS, include_dashboard=False, runtime_env={"env_vars": environment})
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"steps": chosen.steps},
            scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        result = trainer.fit()
        four = torch.load(Path(result.checkpoint.path, "results.pt"))
    print(f"{result.metrics['local']} workers on a node, planned for {result.metrics['machine']}")
    return judge(alone(chosen.steps), four, Console())


if __name__ == "__main__":
    raise SystemExit(main())
