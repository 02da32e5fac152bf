"""Raylets, ports, the cluster token, processes and the state file of a Ray cluster."""
