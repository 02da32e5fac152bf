"""What runs inside Ray Serve replicas: ingress, prefill and decode servers, router."""
