"""Jobs of a sweep on a Kubernetes cluster."""
