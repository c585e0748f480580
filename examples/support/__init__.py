"""What the examples share: runs in processes of their own, and how they are followed."""
