"""What is known or built before the first call."""
