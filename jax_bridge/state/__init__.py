"""Trees of arrays to another mesh of the program, to files, and from files."""
