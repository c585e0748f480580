"""What each way to shard costs: options, moves between layouts, seconds and bytes."""
