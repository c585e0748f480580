"""A Llama of Hugging Face in parallel: by rules, by hand, and by DTensor."""
