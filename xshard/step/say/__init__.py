"""How the answer is said: rules for `parallelize` and `place`, and the suggestion that prints."""
