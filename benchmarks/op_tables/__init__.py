"""Op tables of the aiconfigurator-core wheel: read, turned into our ops, fitted."""
