"""What type checkers say of users' programs: `mypy` and `pyright` read these files, and nothing runs them."""
