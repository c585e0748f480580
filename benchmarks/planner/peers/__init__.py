"""The published planners that ours is measured against, one file each, and how their plans are priced."""
