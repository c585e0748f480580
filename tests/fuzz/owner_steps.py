"""A program whose rows migrate, are born, die, move to more or fewer devices, and are saved and loaded.

Every row has a number for life. After each step every device has to hold the numbers that lists say.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from shutil import rmtree

import numpy as np

import xshard as xs
from tests.fuzz.chains import random_owners
from tests.state import checkpoints

ACTS = {"migrate": 8, "balance": 2, "grow": 3, "shrink": 3, "devices": 2, "files": 1}


def run(steps: int, seed: int, folder: Path) -> Counter[str]:
    """Take random steps -> how many of each kind. Raises AssertionError if a row is lost or doubled."""
    rng = random.Random(repr(seed))
    taken = Counter[str]()
    born = 12
    n = 3
    owners = random_owners(rng, born, n)
    alive = np.arange(born)  # the number of every row
    blocks = xs.reference.scatter(alive, f"n/by(gp,{owners})", xs.Mesh(gp=n))
    for step in range(steps):
        [act] = rng.choices([*ACTS], [*ACTS.values()])
        lists = [block.tolist() for block in blocks]
        rows = len(alive)
        taken[act] += 1
        if act == "migrate":
            moving = rng.sample(range(rows), rng.randint(0, min(5, rows)))
            to = [rng.randrange(n) for _ in moving]
            before = owners
            owners = owners.moved(moving, to)
            for row, part in zip(alive[moving].tolist(), to, strict=True):
                if row not in lists[part]:
                    next(each for each in lists if row in each).remove(row)
                    lists[part].append(row)
            text = f"n/by(gp,{before}) -> n/by(gp,{owners})"
            blocks = xs.reference.run(xs.plan(text, xs.Mesh(gp=n), (rows,), "int64"), blocks)
        elif act == "grow":
            parts = [rng.randrange(n) for _ in range(rng.randint(1, 4 if rows < 40 else 1))]
            places = [owners.part(part).tolist() for part in range(n)]
            for i, part in enumerate(parts):
                places[part].append(rows + i)
                lists[part].append(born + i)
            owners = xs.Owners.of_rows(places)
            born = born + len(parts)
            alive = np.concatenate([alive, np.arange(born - len(parts), born)])
            blocks = [np.array(each, np.int64) for each in lists]
        elif act == "shrink":
            stay = np.sort(rng.sample(range(rows), rng.randint(rows // 2, rows))).astype(int)
            number = np.full(rows, -1)
            number[stay] = np.arange(len(stay))
            kept = [np.isin(owners.part(part), stay) for part in range(n)]
            lists = [[row for row in each if row in {*alive[stay].tolist()}] for each in lists]
            owners = xs.Owners.of_rows([number[owners.part(i)[kept[i]]] for i in range(n)])
            alive = alive[stay]
            blocks = [block[k] for block, k in zip(blocks, kept, strict=True)]
        else:
            before = owners
            mesh = xs.Mesh(gp=n)
            n = n if act == "balance" else rng.randint(1, 5)
            owners = random_owners(rng, rows, n)
            there = xs.Mesh(gp=n)
            ends = f"n/by(gp,{before})", f"n/by(gp,{owners})"
            lists = [alive[owners.part(part)].tolist() for part in range(n)]
            if act == "files":
                whole = xs.reference.gather(blocks, ends[0], mesh, (rows,))
                checkpoints.save(folder / f"{step}", {"x": whole}, {"x": ends[0]}, mesh)
                blocks = checkpoints.load(folder / f"{step}", {"x": ends[1]}, there)["x"]
                rmtree(folder / f"{step}")
            elif act == "devices":
                plan = xs.plan(ends, shape=(rows,), dtype="int64", src_mesh=mesh, dst_mesh=there)
                blocks = xs.reference.run(plan, blocks)
            else:
                blocks = xs.reference.run(xs.plan(ends, mesh, (rows,), "int64"), blocks)
        assert [block.tolist() for block in blocks] == lists, f"step {step} of seed {seed}: {act}"
        assert sorted(row for each in lists for row in each) == alive.tolist(), (
            f"step {step}: {act}"
        )
    return taken
