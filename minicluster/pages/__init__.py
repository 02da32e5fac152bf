"""HTML pages with charts: what the plan, the load test and the studies have in common."""
