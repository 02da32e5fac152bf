"""What networks consist of, cost and do: bill of materials, rail-only study, placement, spares."""
