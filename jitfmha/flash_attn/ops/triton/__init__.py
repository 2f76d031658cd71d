"""Where flash-attn keeps what it has written in Triton."""
