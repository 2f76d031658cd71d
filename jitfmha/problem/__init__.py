"""What is asked for: the arguments of a call, checked, as one immutable problem."""
