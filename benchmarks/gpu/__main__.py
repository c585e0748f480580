"""The torch bridge on one GPU: the rates of the machine, packing, layers, and the host's time of a call.

    python -m benchmarks.gpu           # about two minutes on an H100
    python -m benchmarks.gpu --quick   # small arrays, few rounds

Nothing is sent. A time on the GPU is taken by two events around several calls. Prints the claims and writes a
JSON file. Exit status 1 if a claim fails, 2 where there is no GPU.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import torch_bridge as xt
import xshard as xs
from benchmarks import by_turns, record, torch_calls
from benchmarks.claim import Row, finish
from benchmarks.torch_redistribute import claims, host, packing
from benchmarks.torch_redistribute.__main__ import PACKED, QUICK_PACKED
from benchmarks.torch_redistribute.by_hand import all_gather, reduce_scatter
from benchmarks.torch_redistribute.host import RANKS, nobody
from torch_bridge.nn import domain_parallel

ROWS = 8192
QUICK_ROWS = 1024
COPIES = (1 << 26, 1 << 30)
QUICK_COPIES = (1 << 20,)
# (batch, channels, rows, columns) of a block, and the kernel.
LAYERS = (((1, 64, 256, 1024), 3), ((4, 128, 128, 256), 3), ((1, 32, 512, 2048), 7))
CALLS = 20  # between two events
# A product of two, and what torch has for it beside DTensor.
PRODUCTS = {
    "local": "n d, d e/a -> n e/a",
    "gathered": "n/a d, d e/a -> n e/a",
    "reduced": "n d/a, d/a e -> n e",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = record.options("gpu", __doc__, quick="small arrays, few rounds").parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device is here", file=sys.stderr)
        return 2
    quick = options.quick
    rounds, calls = (3, 20) if quick else (21, 1000)
    rows = {
        "rates": rates(QUICK_ROWS if quick else ROWS, rounds),
        "copies": copies(QUICK_COPIES if quick else COPIES, rounds),
        "launches": launches(rounds),
        "packs": packing.rates(QUICK_PACKED if quick else PACKED["cuda"], 3 if quick else 9),
        "layers": layers(LAYERS[:1] if quick else LAYERS, rounds),
        "host": host.call_times(calls, "cuda"),
        "products": products(calls),
    }
    judged = (*claims.host_times(rows["host"]), *claims.packing(rows["packs"]))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "nccl": nccl}
    return finish(options, "The torch bridge on a GPU", judged, "torch", rows=rows, **facts)


def seconds(call: Callable[[], object], rounds: int, calls: int = CALLS) -> float:
    """The median time of a call on the GPU, among others of its kind."""
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[2:])


def rates(rows: int, rounds: int) -> list[Row]:
    """Operations per second in products of square matrices of random numbers, by dtype."""
    return [
        {"dtype": dtype, "rows": rows, "flops_per_s": 2 * rows**3 / seconds(product, rounds, 5)}
        for dtype, product in _products(rows)
    ]


def _products(rows: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    a, b = (torch.randn(rows, rows, device="cuda") for _ in range(2))
    for name, precision in (("float32 as tf32", "high"), ("float32", "highest")):
        torch.set_float32_matmul_precision(precision)
        yield name, lambda: a @ b
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = a.to(dtype)
        y = b.to(dtype)
        yield str(dtype).removeprefix("torch."), lambda x=x, y=y: x @ y
    one = torch.ones((), device="cuda")
    e, f = (t.to(torch.float8_e4m3fn) for t in (a, b))
    yield (
        "float8_e4m3fn",
        lambda: torch._scaled_mm(e, f.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
    )
    i, j = ((t * 32).clamp(-127, 127).to(torch.int8) for t in (a, b))
    yield "int8", lambda: torch._int_mm(i, j.t())


def copies(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Bytes per second of a copy from memory to memory, each byte counted once."""
    rows = []
    for nbytes in sizes:
        x = torch.randn(nbytes // 4, device="cuda")
        y = torch.empty_like(x)
        took_s = seconds(lambda x=x, y=y: y.copy_(x), rounds)
        rows.append({"bytes": nbytes, "copy_bytes_per_s": nbytes / took_s})
    return rows


def launches(rounds: int) -> list[Row]:
    """Seconds on the GPU and on the host of the smallest calls: a kernel, and NCCL's in a world of one."""
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        x, y = (torch.ones(256, device="cuda") for _ in range(2))
        calls = {
            "kernel": lambda: x.add_(1),
            "all_gather": lambda: all_gather(y, x),
            "all_reduce": lambda: dist.all_reduce(x),
            "reduce_scatter": lambda: reduce_scatter(y, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
        }
        return [{"call": name, "seconds": seconds(call, rounds)} for name, call in calls.items()]
    finally:
        dist.destroy_process_group()


def layers(shapes: Sequence[tuple[tuple[int, ...], int]], rounds: int) -> list[Row]:
    """A convolution of a block with its neighbours' rows, beside torch's own of the block alone."""
    rows = []
    with nobody("cuda") as ranks:
        for shape, kernel in shapes:
            torch.manual_seed(0)
            ordinary = torch.nn.Conv2d(
                shape[1], shape[1], kernel, padding=kernel // 2, device="cuda"
            )
            ordinary = ordinary.to(torch.bfloat16)
            layer = domain_parallel(ordinary, "b c h/a w", ranks)
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            row: Row = {"block": shape, "kernel": kernel, "dtype": "bfloat16"}
            for name, module in (("xshard", layer), ("torch", ordinary)):
                forward, both = torch_calls.calls(module, x)
                row[name] = {"forward_s": seconds(forward, rounds), "both_s": seconds(both, rounds)}
            rows.append(row)
    return rows


def products(rounds: int) -> list[Row]:
    """Seconds that the host needs for a cached product of small blocks, beside torch's einsum and DTensor."""
    rows = []
    mesh = xs.Mesh(a=RANKS)
    with nobody("cuda") as ranks:
        for name, text in PRODUCTS.items():
            plan = xs.plan(text, mesh, sizes={"n": 64, "d": 64, "e": 64}, dtype="float32")
            x, w = (torch.ones(move.source.local_shape(1), device="cuda") for move in plan.moves)
            a, b = (
                torch.ones(part.local_shape(1), device="cuda")
                for part in plan.parts[0].contracted_shardings
            )
            placed = [
                DTensor.from_local(
                    t, ranks, xt.dtensor.to_placements(str(layout), ranks), run_check=False
                )
                for t, layout in zip((x, w), plan.contraction.operands, strict=True)
            ]
            wanted = xt.dtensor.to_placements(str(plan.contraction.result), ranks)
            ways = {
                "xshard": lambda x=x, w=w, text=text: xt.einsum(text, x, w, mesh=mesh),
                "torch.einsum of one block": lambda a=a, b=b: torch.einsum("nd,de->ne", a, b),
                "DTensor": lambda p=placed, q=wanted: (
                    torch.matmul(*p).redistribute(placements=q).to_local()
                ),
            }
            times = {}
            for way, call in ways.items():
                times |= by_turns.medians({way: call}, rounds, warm_up=rounds // 10)
            rows.append({"product": name, "expression": text, **times})
    return rows


if __name__ == "__main__":
    sys.exit(main())
