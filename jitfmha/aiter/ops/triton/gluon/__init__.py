"""Where AITER keeps what it has written in Gluon."""
