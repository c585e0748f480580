"""Which collectives of JAX programs travel beside products, in programs compiled for TPUs and GPUs.

    python -m benchmarks.jax_async                                  # TPU v5e: wants libtpu, and no TPU
    python -m benchmarks.jax_async --target h100 --gpu-target FILE  # wants JAX's plugin for CUDA, and no GPU

Compiles the gradients of training steps ahead of time and reads their schedule. FILE describes the GPU: a
`GpuTargetConfigProto` as text, of which XLA has one for each (`xla/backends/gpu/target_config/specs`). Prints
rows, and writes a JSON file. Nothing is timed. Exit status 1 if there is no compiler.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record.options("jax_async", __doc__, quick="ring attention alone")
    parser.add_argument("--target", default="tpu_v5e", help="the profile of the chips")
    parser.add_argument("--gpu-target", type=Path, help="the description of a GPU")
    parser.add_argument("--only", default="", help="programs whose name begins so")
    parser.add_argument("--xla", default="{}", help="options of XLA, as JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask

    import jax  # it reads its environment first

    from benchmarks.jax_async import programs
    from xshard.cost.machine import use_profile

    jax.config.update("jax_platforms", "cpu")  # of this machine
    gpu_target = options.gpu_target.read_text() if options.gpu_target else ""
    try:
        devices = programs.devices_of(options.target, gpu_target)
    except Exception as error:  # of any kind: the compiler's own
        print(f"no compiler for {options.target}: {error}", file=sys.stderr)
        return 1
    xla = json.loads(options.xla)
    rows = []
    with use_profile(options.target):
        for name, program in programs.PROGRAMS.items():
            if not name.startswith("ring" if options.quick else options.only):
                continue
            found = measured(name, program.lowered(devices), xla)
            for row in found:
                print(*row.values(), sep=" | ", flush=True)
            rows += found
    libraries = [
        "jax",
        "jaxlib",
        "libtpu" if options.target.startswith("tpu") else "jax-cuda12-plugin",
    ]
    # A file for each target, and for each choice of options.
    options.name = "_".join(["jax_async", options.target, *map(str, xla.values())])
    command = f"python -m benchmarks.jax_async --target {options.target}"
    facts = record.about(options, *libraries, command=command, xla=xla)
    print(record.write(options, facts, rows=rows))
    return 0


def measured(name: str, lowered: Any, xla: dict[str, Any]) -> list[dict[str, Any]]:
    """Compile a program; return a row for each place and kind of collective, with how many are pairs."""
    from benchmarks.jax_async.hlo import Module

    compiled = lowered.compile(compiler_options=xla)
    found = list(Module(compiled.as_text()).travelling())
    kinds = Counter((each.place, each.kind) for each in found)
    rows = []
    for (place, kind), number in kinds.items():
        same = [each for each in found if (each.place, each.kind) == (place, kind)]
        row = {"program": name, "place": place, "collective": kind, "number": number}
        row["pairs"] = sum(each.is_async for each in same)
        row["beside products"] = sum(each.products > 0 for each in same)
        row["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
