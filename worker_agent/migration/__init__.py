"""Live migration: source.py serves Export, target.py serves Import. See docs/migration.md."""
