"""The package that the three commands share."""

from minicluster.compiled import use_compiled

COMPILED = use_compiled()
"""True if the simulation's modules are the compiled ones (`minicluster/compiled.py`)."""
