"""The torch bridge beside DTensor, collectives by hand and plain copies."""
