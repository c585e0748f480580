"""The parts of long_context.py: text, mixers of a sequence that is cut, a model of them, and its runs."""
