"""A model that is trained by one program and served by another: the parts of `train_and_serve.py`."""
