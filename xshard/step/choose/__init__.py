"""Which ways are chosen: elimination, linear and integer programs, plans that people write."""
