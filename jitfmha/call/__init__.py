"""A call from its arguments to the launch of a kernel."""
