"""Whole models under rules: blocks, activations and gradients of every module."""
