"""The published planners that ours is compared with, one file each, and how their plans are priced."""
