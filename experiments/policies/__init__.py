"""All policies with equal batch orders on equal requests (docs/policies-compared.md)."""
