"""Plans: steps that are checked, priced, printed, written as JSON, and kept on disk."""
