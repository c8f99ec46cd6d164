"""What lives on which rank: groups, shards, buckets, and the data-parallel wrapper."""
