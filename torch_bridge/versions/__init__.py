"""All that is used of torch without a promise that it stays: the files to change for a release.

A file for each subject. Every name has the reason why no public one does, and what would go wrong
without it. Names that calls use many times are bound as they are: a function of ours around them
would cost more than they do. On a torch without one of these names the import fails, and says so.

Three things stay elsewhere, as `tests/torch_bridge/test_versions.py` lists:

- `mesh/process_mesh.py` reads `c10d._world.default_pg` for each call: the record of groups is
  another one per thread in tests, so that nothing of it can be bound here.
- `dtensor/placements.py`, `step/classes.py`, `step/record.py`, `testing/byte_counter.py` have
  tables of operations and of reductions by the names that arrive; one that they do not know raises.
- `state/dcp.py` has the names that a checkpoint of torch may hold, which are part of a file format.
"""
