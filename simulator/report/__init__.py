"""Reports as one HTML file: no scripts, nothing loaded from elsewhere."""
