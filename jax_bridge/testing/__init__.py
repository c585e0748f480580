"""The JAX side of the test kit: workers that answer its questions, and traffic of programs."""
