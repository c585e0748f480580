"""Redistributions between nodes, joined by links that are slow for real."""
