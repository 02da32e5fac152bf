"""Networks: bill of materials, collectives, placement, failures and spares."""
