"""Train a U-Net on photographs with their rows on four devices, and compare every loss with one device.

    python examples/domain_parallel.py            # also writes domain_parallel.png

1. torch on a single device;
2. torch on four processes: the same model, made domain-parallel by one call;
3. JAX on four devices: the same network inside shard_map.

Strided and transposed convolutions, a pool, interpolation, norms over all rows, columns that close up to a
ring; 427 rows over four devices, so that no block divides evenly. The picture shows how far the network is
from one device, if every device pads and normalises its own rows, and here: an error at every seam, and none.
The exit status is 1 if a loss differs, or if a seam shows.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from support.losses import Results, concluded, differing, loss_table
from support.runs import follow_all, options

TOLERANCE = 1e-5  # relative, of float32 losses

Images = Mapping[str, np.ndarray]


def main() -> int:
    parser = options(__doc__, steps=8)
    parser.add_argument("--picture", type=Path, default=Path("domain_parallel.png"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "torch, 1 device": ["domain.with_torch", "single", folder],
            "torch, 4 processes": ["domain.with_torch", "sharded", folder],
            "JAX, 4 devices": ["domain.with_jax"],
        }
        results = follow_all(runs, chosen.steps)
        images = {
            name: np.load(Path(folder, f"{name}.npy")) for name in ("whole", "sharded", "alone")
        }
    draw(images, chosen.picture)
    return judge(results, images)


def judge(results: Results, images: Images) -> int:
    """Print the losses, the errors of the picture, and what is wrong with them; 0 if nothing is."""
    console = Console()
    console.print(loss_table(results))
    ours, naive = (error(images, name) for name in ("sharded", "alone"))
    errors = f"{ours.max():.1e} here, {naive.max():.1e} where devices pad alone"
    console.print(f"Largest error of a pixel: {errors}.")
    complaints = differing(results, TOLERANCE)
    if not ours.max() <= 1e-3:  # NaN is no less
        complaints.append(f"Pixels differ by {ours.max():.1e} from those of one device.")
    return concluded(console, results, complaints)


def error(images: Images, name: str) -> np.ndarray:
    """[images, rows, columns]: the largest difference of a colour from one device."""
    return np.abs(images[name] - images["whole"]).max(axis=1)


def draw(images: Images, path: Path) -> None:
    """The errors of the first photograph on one scale: devices on their own, and all together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    figure, panels = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    scale = LogNorm(1e-6, 1)
    titles = {"alone": "every device pads and normalises its own rows", "sharded": "xshard"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        errors = error(images, name)[0]
        shown = panel.imshow(np.maximum(errors, 1e-6), norm=scale, cmap="magma")
        panel.set_title(f"{title}: largest error {errors.max():.1e}")
        panel.set_xlabel("column")
    panels[0].set_ylabel("row")
    figure.colorbar(shown, ax=panels, label="difference from one device", shrink=0.9)
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
