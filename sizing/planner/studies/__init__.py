"""What a planner asks next: what if, what else, how far, and with one replica less."""
