"""The admin API: what operators see and change."""
