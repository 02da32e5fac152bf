"""Plans and predictions as tables that people read."""
