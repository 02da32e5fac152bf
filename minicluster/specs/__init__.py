"""What is given: facts as frozen values, with their invariants."""
