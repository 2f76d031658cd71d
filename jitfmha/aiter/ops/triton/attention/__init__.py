"""Where AITER keeps what it has written in Triton."""
