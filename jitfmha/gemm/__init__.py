"""Matrix products with an epilogue, which attention does not need and models do."""
