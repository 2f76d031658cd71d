"""Where AITER keeps its operators."""
