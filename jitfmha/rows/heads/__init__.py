"""What stands between projections and attention: norms of heads, rotation, and the cache."""
