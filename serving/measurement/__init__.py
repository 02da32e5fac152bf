"""Step benchmark of deployed engines, and the random-weight demo model."""
