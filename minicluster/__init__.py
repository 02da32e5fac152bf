"""What the three commands share, and all that they share."""
