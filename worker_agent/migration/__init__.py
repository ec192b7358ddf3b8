"""Live migration: source.py serves Export, target.py serves Import. docs/migration.md tells the whole."""
