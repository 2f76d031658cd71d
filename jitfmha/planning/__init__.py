"""What a call runs on, and which kernel would take it."""
