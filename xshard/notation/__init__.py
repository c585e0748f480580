"""The notation of layouts (docs/notation.md): texts to values, and back."""
