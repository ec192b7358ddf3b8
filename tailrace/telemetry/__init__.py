"""OpenTelemetry traces and Prometheus metrics."""
