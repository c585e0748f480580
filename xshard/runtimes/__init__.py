"""Processes that load a framework, and the calibration of a machine with them."""
