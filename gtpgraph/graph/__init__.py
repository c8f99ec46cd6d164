"""How a backward becomes a graph with explicit readiness."""
