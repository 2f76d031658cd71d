"""Softmax, RMSNorm and LayerNorm over rows, which attention does not need and models do."""
