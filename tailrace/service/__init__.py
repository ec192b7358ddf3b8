"""What every service needs: gRPC server with health and reflection, settings, shutdown."""
