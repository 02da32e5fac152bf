"""From a plan to what Ray Serve, KubeRay and Compose take; pure functions."""
