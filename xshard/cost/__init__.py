"""Seconds and bytes of steps on a machine, and lower bounds of the elements that any plan must move."""
