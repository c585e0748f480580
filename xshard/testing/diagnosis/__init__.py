"""Likely causes of wrong blocks, by the traces that classic mistakes leave."""
